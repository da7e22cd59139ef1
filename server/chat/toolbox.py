"""The tools that one request offers, as the reader of a model's text needs them: by name, also by half a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from server.chat.arguments import ArgumentSchema
from server.chat.messages import Tool

_MAX_NAME = 128
_NAME = re.compile(r"\w[\w.\-/:@]*")
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./")
_GAP = re.compile(r"(?:\s|\\[nrt])*")
_EVERYTHING = ArgumentSchema({})


def skip_gap(text: str) -> int:
    """Length of the layout at the start: blanks, line breaks, and the two characters \\n where a model wrote those."""
    if not text or not (text[0].isspace() or text[0] == "\\"):
        return 0
    found = _GAP.match(text)
    return found.end() if found else 0


def is_gap(text: str) -> bool:
    return skip_gap(text) == len(text)


def strip_gap(text: str) -> str:
    text = text[skip_gap(text) :].rstrip()
    while text.endswith(("\\n", "\\r", "\\t")):
        text = text[:-2].rstrip()
    return text


def is_plausible_name(text: str) -> bool:
    """Could be a tool that was not offered: one word of the characters that names of functions have."""
    return len(text) <= _MAX_NAME and _NAME.fullmatch(text) is not None


class Toolbox:
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools if tool.name}
        self._schemas: dict[str, ArgumentSchema] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def __bool__(self) -> bool:
        return bool(self._tools)

    def schema(self, name: str) -> ArgumentSchema:
        """The arguments of a tool; one that was not offered declares nothing."""
        if name not in self._schemas:
            tool = self._tools.get(name)
            self._schemas[name] = _EVERYTHING if tool is None else ArgumentSchema(tool.parameters)
        return self._schemas[name]

    def clean_name(self, text: str) -> str:
        """The name without layout, and without the quotes or the "functions." around it where that makes it an offered
        one."""
        name = strip_gap(text)
        if name in self._tools:
            return name
        bare = name.strip("`\"'*").rstrip(":>( ")
        for candidate in (bare, bare.removeprefix("functions.")):
            if candidate in self._tools:
                return candidate
        return name

    def may_become_name(self, text: str) -> bool:
        """`text` is the start of an offered name, or all of it."""
        return text in self._prefixes or text in self._tools

    def split_glued(self, text: str) -> tuple[str, str] | None:
        """An offered name that `text` starts with, and the key right behind it: the longest name, unless only a shorter
        one leaves a key that its tool declares."""
        splits = [
            (text[:end], rest)
            for end in range(min(self._longest, len(text)), 0, -1)
            if text[:end] in self._tools and (rest := strip_gap(text[end:]))
        ]
        for name, rest in splits:
            if rest in self.schema(name).declared:
                return name, rest
        return splits[0] if splits else None

    def split_body(self, text: str) -> tuple[str, str] | None:
        """An offered name that `text` starts with as a word of its own, and all that follows."""
        for end in range(min(self._longest, len(text)), 0, -1):
            if text[:end] in self._tools and text[end : end + 1] not in _NAME_CHARACTERS:
                return text[:end], text[end:]
        return None

    def name_at_end(self, text: str) -> str | None:
        """The longest offered name that `text` ends with, as a word of its own."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._tools and _is_word_start(text, start, ""):
                return text[start:]
        return None

    def held_from(self, text: str, before: str) -> int:
        """Where the tail of `text` starts that may still become an offered name; its length if there is none.

        `before`: what was written before `text`, of which the last character counts.
        """
        n = len(text)
        start = max(0, n - self._longest)
        while (found := self._half_name.search(text, start)) is not None:
            start = found.start()
            if text[start:] in self._prefixes and _is_word_start(text, start, before):
                return start
            start += 1
        return n

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tools), default=0)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(name[:end] for name in self._tools for end in range(1, len(name) + 1))

    @cached_property
    def _half_name(self) -> re.Pattern[str]:
        """The end of a text that starts like a name and has only characters of names."""
        firsts = "".join(sorted({name[0] for name in self._tools}))
        others = "".join(sorted(set("".join(self._tools))))
        return re.compile(rf"[{re.escape(firsts)}][{re.escape(others)}]*+\Z")


def _is_word_start(text: str, start: int, before: str) -> bool:
    """A name in letters of its own script may follow any other, as in Chinese text around an English name."""
    if text[start] not in _NAME_CHARACTERS:
        return True
    previous = text[start - 1] if start else before[-1:]
    return previous not in _NAME_CHARACTERS
