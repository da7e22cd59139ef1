"""The text right behind `<tool_call>`: the name of a tool, a call in another notation, or prose that mentions the tag.

Prose is told apart as early as can be, so that an answer about the format does not stall until its end. What is decided
depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from server.chat.toolbox import Toolbox, is_gap, skip_gap

_LONGEST_WORD = 128
_LOOK_AT = 1024
_THREE_WORDS = re.compile(r"\S+\s+\S+\s+\S+\s")
_STRUCTURE = re.compile(r"[={(\[>:\"']")  # a name with these behind it may be a call in another notation
_QUOTES = "\"'`*"


class HeadKind(Enum):
    UNDECIDED = auto()
    BODY = auto()  # to be kept until the call is closed
    PROSE = auto()


class Head:
    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._parts: list[str] = []
        self._n = 0
        self._kind = HeadKind.UNDECIDED

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def name(self) -> str:
        return self._toolbox.clean_name(self.text)

    @property
    def is_empty(self) -> bool:
        return is_gap(self.text)

    @property
    def may_be_cut_call(self) -> bool:
        """At a cut: the start of a call rather than prose."""
        if self._kind is HeadKind.BODY:
            return True
        words = self.text[skip_gap(self.text) :].split()
        return len(words) <= 1 or self._toolbox.may_become_name(words[0])

    def add(self, text: str) -> HeadKind:
        self._parts.append(text)
        if self._kind is HeadKind.UNDECIDED and text:
            whole = self.text
            if self._toolbox.may_become_name(whole):
                return self._kind
            start = skip_gap(whole)
            self._parts = [whole[start:]]
            if start < len(whole):
                self._kind = self._decide(whole[start:])
        return self._kind

    def _decide(self, text: str) -> HeadKind:
        kind = self._decide_start(text[:_LOOK_AT])
        if kind is HeadKind.UNDECIDED and len(text) > _LOOK_AT:
            return HeadKind.PROSE
        return kind

    def _decide_start(self, text: str) -> HeadKind:
        if text[0] in "{[":
            return HeadKind.BODY
        if text.startswith("```"):
            return HeadKind.BODY
        if not (text[0].isalnum() or text[0] in "_\\" or self._toolbox.may_become_name(text[0])):
            return self._decide_quoted(text)
        word = text.split(maxsplit=1)[0][: _LONGEST_WORD + 1]
        if len(word) > _LONGEST_WORD and not _STRUCTURE.search(word):
            return HeadKind.PROSE
        three = _THREE_WORDS.match(text)
        if _STRUCTURE.search(three.group() if three is not None else text):
            return HeadKind.BODY
        return HeadKind.UNDECIDED if three is None else HeadKind.PROSE

    def _decide_quoted(self, text: str) -> HeadKind:
        if text[0] not in _QUOTES:
            return HeadKind.PROSE
        if "```".startswith(text):
            return HeadKind.UNDECIDED
        bare = text.lstrip(_QUOTES)
        name = re.split(r"[\"'`*\s]", bare, maxsplit=1)[0]
        if not self._toolbox.may_become_name(name) and bare:
            return HeadKind.PROSE
        return HeadKind.UNDECIDED
