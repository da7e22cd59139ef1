"""Finds GLM's tags in text that arrives in pieces.

Every tag starts with "<", ends with ">" and has neither in between. The scanner keeps back only a suffix that may
still become one of its tags, so no more than the longest tag less one character.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Tag(Enum):
    """The value is the tag's text, as the engine writes the control token out."""

    THINK_OPEN = "<think>"
    THINK_CLOSE = "</think>"
    CALL_OPEN = "<tool_call>"
    CALL_CLOSE = "</tool_call>"
    KEY_OPEN = "<arg_key>"
    KEY_CLOSE = "</arg_key>"
    VALUE_OPEN = "<arg_value>"
    VALUE_CLOSE = "</arg_value>"
    RESPONSE_OPEN = "<tool_response>"
    SYSTEM = "<|system|>"
    USER = "<|user|>"
    ASSISTANT = "<|assistant|>"
    OBSERVATION = "<|observation|>"
    ENDOFTEXT = "<|endoftext|>"
    BOX_OPEN = "<|begin_of_box|>"
    BOX_CLOSE = "<|end_of_box|>"

    __hash__ = object.__hash__  # Enum's own is a Python function, and sets are asked on every tag


STOP_TAGS = frozenset({Tag.USER, Tag.OBSERVATION, Tag.ENDOFTEXT})
TURN_TAGS = STOP_TAGS | {Tag.SYSTEM, Tag.ASSISTANT}
BOX_TAGS = frozenset({Tag.BOX_OPEN, Tag.BOX_CLOSE})
THINK_TAGS = frozenset({Tag.THINK_OPEN, Tag.THINK_CLOSE})
CALL_TAGS = frozenset(
    {Tag.CALL_OPEN, Tag.CALL_CLOSE, Tag.KEY_OPEN, Tag.KEY_CLOSE, Tag.VALUE_OPEN, Tag.VALUE_CLOSE, Tag.RESPONSE_OPEN}
)
TEXT_TAGS = TURN_TAGS | BOX_TAGS | THINK_TAGS  # what counts when no tool is offered

Token = tuple[Tag | None, str]
"""A tag with its text, or None with plain text (never empty)."""


class TagScanner:
    """Cuts text into tokens. Work is linear in the text: each "<" costs one look-up of bounded length."""

    __slots__ = ("_by_text", "_longest", "_prefixes", "held")

    def __init__(self, tags: Iterable[Tag]) -> None:
        self._by_text = {tag.value: tag for tag in tags}
        self._longest = max(map(len, self._by_text), default=0)
        self._prefixes = frozenset(text[:end] for text in self._by_text for end in range(1, len(text)))
        self.held = ""  # the suffix kept back because it may begin a tag

    def scan(self, text: str) -> list[Token]:
        buffer = text
        if self.held:
            buffer = self.held + text
            self.held = ""
        find, longest, by_text = buffer.find, self._longest, self._by_text
        tokens: list[Token] = []
        start = 0
        at = find("<")
        while at >= 0:
            end = find(">", at, at + longest) + 1
            if end:
                piece = buffer[at:end]
                tag = by_text.get(piece)
                if tag is not None:
                    if at > start:
                        tokens.append((None, buffer[start:at]))
                    tokens.append((tag, piece))
                    start = end
                    at = find("<", end)
                    continue
            elif len(buffer) - at < longest and buffer[at:] in self._prefixes:
                self.held = buffer[at:]
                if at > start:
                    tokens.append((None, buffer[start:at]))
                return tokens
            at = find("<", at + 1)
        if start < len(buffer):
            tokens.append((None, buffer[start:] if start else buffer))
        return tokens

    def flush(self) -> str:
        """Give up the suffix kept back: it is text after all."""
        held, self.held = self.held, ""
        return held
