"""The plain dialect: all that the model writes is content."""

from __future__ import annotations

from collections.abc import Sequence

from server.chat.messages import ContentDelta, Delta, EndOfText, Place, Prompt, Tool


class PlainParser:
    place = Place.ANSWER
    ended = False
    opens_another_call = False

    def feed(self, text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self, end: EndOfText) -> list[Delta]:
        return []


class PlainDialect:
    """For models whose turns have no tags that this project reads."""

    @property
    def name(self) -> str:
        return "plain"

    @property
    def shows_special_tokens(self) -> bool:
        return False

    @property
    def can_force_calls(self) -> bool:
        return False

    @property
    def turn_tags(self) -> tuple[str, ...]:
        return ()

    def own_tags(self, *, with_calls: bool) -> tuple[str, ...]:
        return ()

    def parser(self, prompt: Prompt, tools: Sequence[Tool]) -> PlainParser:
        return PlainParser()
