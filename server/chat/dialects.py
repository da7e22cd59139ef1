"""A dialect is how one family of models writes turns: which parser reads its text. Chosen once, at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.chat.glm import GlmDialect
from server.chat.glm_generation import Generation
from server.chat.messages import Delta, EndOfText, Place, Prompt, Tool
from server.chat.plain import PlainDialect


class Parser(Protocol):
    """Reads the text of one answer as it comes. Never raises on model text."""

    @property
    def place(self) -> Place: ...

    @property
    def ended(self) -> bool:
        """The model went on to another's turn: whatever comes is not part of the answer."""
        ...

    @property
    def opens_another_call(self) -> bool:
        """A call is complete, and the text has begun the next one."""
        ...

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self, end: EndOfText) -> list[Delta]:
        """Flush what was held back. The parser is used up afterwards."""
        ...


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shows_special_tokens(self) -> bool:
        """The engine must write control tokens out as text, because the parser reads them."""
        ...

    @property
    def can_force_calls(self) -> bool:
        """There is a grammar of its tool calls (`glm_call_grammar.py`)."""
        ...

    @property
    def turn_tags(self) -> tuple[str, ...]:
        """Where one is written outside a call, the answer is over."""
        ...

    def own_tags(self, *, with_calls: bool) -> tuple[str, ...]:
        """Texts that the parser never takes for content."""
        ...

    def parser(self, prompt: Prompt, tools: Sequence[Tool]) -> Parser: ...


def choose_dialect(generation: Generation | None) -> Dialect:
    """None: a model that is no GLM from 4.5 on."""
    return PlainDialect() if generation is None else GlmDialect(generation)
