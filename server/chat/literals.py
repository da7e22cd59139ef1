"""Keeps control-token texts that a client typed apart from those that a template wrote.

A message may contain `<|im_start|>` or any other control token's text. Tokenised with the template around it, the text
would become the token, and the writer of a tool result could end the user's turn. So such texts are replaced by marks
before the template runs, and come back afterwards as literal spans. Everything else stays where it was: where no
message has such a text, nothing is replaced and the prompt is one span.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.chat.messages import PromptSpan

# Tags that a model writes itself. In its own turns they keep their meaning, since templates look for them there.
TURN_TAGS = frozenset(
    {"<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}
)

# Noncharacters (Unicode 23.7): never text, passed through by every string method and by JSON.
_MARK_CHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ControlTexts:
    """The control texts of one vocabulary, ready to be searched for."""

    def __init__(self, texts: Sequence[str]) -> None:
        ordered = sorted({text for text in texts if text}, key=len, reverse=True)  # the longest match wins
        self._everywhere = _pattern(ordered)
        self._in_own_turns = _pattern([text for text in ordered if text not in TURN_TAGS])
        self._starts: dict[str, set[str]] = {}  # proper prefix → what would complete it
        for text in ordered:
            for cut in range(1, len(text)):
                self._starts.setdefault(text[:cut], set()).add(text[cut:])
        self._longest = max(map(len, ordered), default=0)

    def found_in(self, text: str, *, own_turn: bool) -> bool:
        pattern = self._in_own_turns if own_turn else self._everywhere
        return pattern is not None and pattern.search(text) is not None

    def pattern(self, *, own_turn: bool) -> re.Pattern[str] | None:
        return self._in_own_turns if own_turn else self._everywhere

    def open_ends(self, texts: Sequence[str]) -> set[str]:
        """Tails of `texts` that the head of another text would complete to a control text, should a template put the
        two side by side."""
        tails = {
            text[-length:]
            for text in texts
            for length in range(1, min(self._longest, len(text) + 1))
            if text[-length:] in self._starts
        }
        return {tail for tail in tails if any(text.startswith(tuple(self._starts[tail])) for text in texts)}


class Marker:
    """Replaces control texts by marks in one conversation, and turns the marks in the rendered prompt into spans."""

    def __init__(self, controls: ControlTexts, texts: Sequence[str]) -> None:
        """`texts`: every string of the conversation; the marks use characters that none of them has."""
        self._controls = controls
        self._tails = sorted(controls.open_ends(texts), key=len, reverse=True)
        used = set().union(*texts) if texts else set()
        free = [character for character in _MARK_CHARACTERS if character not in used]
        if len(free) < 2:
            raise ValueError("the messages use every Unicode noncharacter from U+FDD0 to U+FDEF; leave some out")
        self._open, self._close = free[0], free[1]
        self._literals: list[str] = []

    def mark(self, text: str, *, own_turn: bool = False) -> str:
        pattern = self._controls.pattern(own_turn=own_turn)
        marked = text if pattern is None else pattern.sub(lambda match: self._mark(match.group()), text)
        for tail in self._tails:
            if marked.endswith(tail):
                return marked[: -len(tail)] + self._mark(tail)
        return marked

    def mark_tree(self, value: Any) -> Any:
        """`mark` in every string of a JSON value, keys included."""
        match value:
            case str():
                return self.mark(value)
            case dict():  # or a subclass, which it stays
                return type(value)({self.mark(key): self.mark_tree(item) for key, item in value.items()})
            case list() | tuple():
                return [self.mark_tree(item) for item in value]
            case _:
                return value

    def spans(self, rendered: str) -> list[PromptSpan]:
        """The rendered prompt with the marks taken out; neighbours of one kind are joined."""
        # A template may ask `tojson` for ASCII only, which writes the marks as escapes.
        opened, closed = (f"(?:{character}|\\\\u{ord(character):04x})" for character in (self._open, self._close))
        spans: list[PromptSpan] = []
        for i, piece in enumerate(re.split(f"{opened}([0-9]+){closed}", rendered)):
            literal = i % 2 == 1
            text = self._literals[int(piece)] if literal else piece
            if not text:
                continue
            if spans and spans[-1].literal == literal:
                text = spans.pop().text + text
            spans.append(PromptSpan(text, literal))
        return spans

    def _mark(self, literal: str) -> str:
        self._literals.append(literal)
        return f"{self._open}{len(self._literals) - 1}{self._close}"


def strings_of(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield key
                yield from strings_of(item)
        case list() | tuple():
            for item in value:
                yield from strings_of(item)


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, texts))) if texts else None
