"""A dialect is how one family of models writes turns: which parser reads its text. Chosen once, at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.chat.messages import Delta, EndOfText, Prompt, Tool
from server.chat.plain import PlainDialect


class Parser(Protocol):
    """Reads the text of one answer as it comes. Never raises on model text."""

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

    def parser(self, prompt: Prompt, tools: Sequence[Tool]) -> Parser: ...


def choose_dialect(architecture: str, template: str) -> Dialect:
    """The dialect of a model, from llama.cpp's name of its architecture and the source of its chat template."""
    return PlainDialect()
