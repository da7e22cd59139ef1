"""Finds the end of an argument value, which is raw text and may hold any tag as data.

A closing tag counts only where the call's own markup goes on behind it. So a tag that may end the value is held back
with what follows until that is clear, and is data otherwise. What follows is bounded: a key of the tool, a name of a
tool, or a piece of text of `MAX_DOUBT` characters.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from server.chat.tags import STOP_TAGS, TURN_TAGS, Tag, Token
from server.chat.toolbox import Toolbox, is_gap, strip_gap

MAX_DOUBT = 4096  # characters after a </tool_call> inside a value until it is taken for data
_MAX_GAP = 1024  # characters of layout, or of a key or name, behind a tag in doubt; more is not markup

_BEFORE_MENTION = frozenset(" \t`'\"(*")  # characters before a tag that is spoken of rather than written

_ENDERS = frozenset({Tag.VALUE_CLOSE, Tag.CALL_CLOSE, Tag.KEY_OPEN})
_AFTER_VALUE = TURN_TAGS | {Tag.KEY_OPEN, Tag.CALL_CLOSE, Tag.CALL_OPEN}


class Verdict(Enum):
    OPEN = auto()  # the value goes on, or nobody knows yet
    CLOSED = auto()  # by its own closing tag
    CLOSED_BY_KEY = auto()  # its closing tag is lost; the next key begins
    CLOSED_BY_CALL = auto()  # its closing tag is lost; the call ends


class _Doubt(Enum):
    """What a held tag turned out to be, where it is not a Verdict."""

    DATA = auto()
    WEAK = auto()  # data, unless the whole text ends without a better closing tag


class Keys(Protocol):
    """What the value's call knows of its keys."""

    def is_open_key(self, text: str) -> bool:
        """A key that the tool declares and the call does not have yet."""
        ...

    def may_become_open_key(self, text: str) -> bool: ...


class ValueReader:
    """Reads one value. `write` gets its text as far as it is certain; `rest` is what follows once it has closed."""

    def __init__(self, keys: Keys, toolbox: Toolbox, write: Callable[[str], None]) -> None:
        self.rest: list[Token] = []
        self.last = ""  # the text read last; whoever writes text past this reader sets it
        self._keys = keys
        self._toolbox = toolbox
        self._write = write
        self._fresh = True  # nothing has been read yet
        self._doubt: list[Token] = []  # a tag that may end the value, and what follows
        self._weak: list[Token] = []  # the first </tool_call> that is likely data, and what follows
        self._n_weak = 0

    @property
    def is_plain(self) -> bool:
        """Text may go straight to `write`."""
        return not self._doubt and not self._weak and not self._fresh

    def token(self, tag: Tag | None, text: str) -> Verdict:
        if self._fresh:
            self._fresh = False
            if tag is Tag.VALUE_OPEN:  # written twice
                return Verdict.OPEN
        if self._doubt:
            self._append(tag, text)
            return self._settle(final=False)
        if tag in _ENDERS:
            self._doubt.append((tag, text))
        else:
            self._data(tag, text)
        return Verdict.OPEN

    def finish(self, *, cut: bool) -> Verdict:
        """The whole text has ended. OPEN: the value was never closed."""
        while self._doubt:
            verdict = self._settle(final=True)
            if verdict is not Verdict.OPEN:
                return verdict
        if self._weak and not cut:
            self.rest = self._weak[1:]
            self._weak = []
            return Verdict.CLOSED_BY_CALL
        return Verdict.OPEN

    def _append(self, tag: Tag | None, text: str) -> None:
        if tag is None and self._doubt[-1][0] is None:
            self._doubt[-1] = (None, self._doubt[-1][1] + text)
        else:
            self._doubt.append((tag, text))

    def _settle(self, *, final: bool) -> Verdict:
        match self._weigh(final=final):
            case Verdict.OPEN:
                return Verdict.OPEN
            case Verdict() as verdict:
                self._give_up_weak()
                # A lost closing tag is followed by markup, a found one or the call's own by what is behind it.
                self.rest = self._doubt if verdict is Verdict.CLOSED_BY_KEY else self._doubt[1:]
                self._doubt = []
                return verdict
            case found:
                (tag, text), *following = self._doubt
                self._doubt = []
                if found is _Doubt.WEAK and not self._weak:
                    self._weak.append((tag, text))
                else:
                    self._data(tag, text)
                verdict = Verdict.OPEN
                for at, (next_tag, next_text) in enumerate(following):
                    verdict = self.token(next_tag, next_text)
                    if verdict is not Verdict.OPEN:
                        self.rest += following[at + 1 :]
                        break
                return verdict

    def _data(self, tag: Tag | None, text: str) -> None:
        self.last = text
        if not self._weak:
            self._write(text)
            return
        self._weak.append((tag, text))
        self._n_weak += len(text)
        if self._n_weak > MAX_DOUBT:
            self._give_up_weak()

    def _give_up_weak(self) -> None:
        for _, text in self._weak:
            self._write(text)
        self._weak = []
        self._n_weak = 0

    # ── what a tag in doubt is ───────────────────────────────────────────────────────────────────────────────────────

    def _weigh(self, *, final: bool) -> Verdict | _Doubt:
        if len(self._doubt[-1][1]) > _MAX_GAP:
            return _Doubt.WEAK if self._doubt[0][0] is Tag.CALL_CLOSE else _Doubt.DATA
        following = [*self._doubt[1:], (None, ""), (None, "")]
        between = ""
        if following[0][0] is None:
            between = following.pop(0)[1]
        match self._doubt[0][0]:
            case Tag.VALUE_CLOSE:
                return self._weigh_value_close(between, following[0][0], final=final)
            case Tag.CALL_CLOSE:
                return self._weigh_call_close(between, following, final=final)
            case _:
                return self._weigh_key_open(between, following, final=final)

    def _weigh_value_close(self, between: str, tag: Tag | None, *, final: bool) -> Verdict | _Doubt:
        if _is_gap_so_far(between, closed=tag is not None or final):
            if tag is None:
                return Verdict.CLOSED if final else Verdict.OPEN
            return Verdict.CLOSED if tag in _AFTER_VALUE else _Doubt.DATA
        # Text follows: it may be the next key, with its opening tag lost.
        if tag is None:
            possible = not final and self._keys.may_become_open_key(_core_so_far(between))
            return Verdict.OPEN if possible else _Doubt.DATA
        is_key = tag is Tag.KEY_CLOSE and self._keys.is_open_key(strip_gap(between))
        return Verdict.CLOSED if is_key else _Doubt.DATA

    def _weigh_call_close(self, between: str, following: list[Token], *, final: bool) -> Verdict | _Doubt:
        tag = following[0][0]
        if not _is_gap_so_far(between, closed=tag is not None or final):
            return _Doubt.WEAK
        if tag is None:
            return Verdict.CLOSED_BY_CALL if final else Verdict.OPEN
        if tag in STOP_TAGS:
            return Verdict.CLOSED_BY_CALL
        if tag is not Tag.CALL_OPEN:
            return _Doubt.WEAK
        # The next call, or the text of one as data? An offered name decides.
        text, behind = "", following[1]
        if behind[0] is None:
            text, behind = behind[1], following[2]
        if behind[0] is None:
            name = _core_so_far(text)
            if not name or self._toolbox.may_become_name(name):
                return Verdict.CLOSED_BY_CALL if final else Verdict.OPEN
            return _Doubt.WEAK
        return Verdict.CLOSED_BY_CALL if strip_gap(text) in self._toolbox else _Doubt.WEAK

    def _weigh_key_open(self, between: str, following: list[Token], *, final: bool) -> Verdict | _Doubt:
        tag = following[0][0]
        if tag is None:
            key = _core_so_far(between)
            possible = not final and (not key or self._keys.may_become_open_key(key))
            return Verdict.OPEN if possible else _Doubt.DATA
        if tag is not Tag.KEY_CLOSE or not self._keys.is_open_key(strip_gap(between)):
            return _Doubt.DATA
        gap, behind = "", following[1]
        if behind[0] is None:
            gap, behind = behind[1], following[2]
        if not _is_gap_so_far(gap, closed=behind[0] is not None or final):
            return _Doubt.DATA
        if behind[0] is None:
            return _Doubt.DATA if final else Verdict.OPEN
        is_mention = self.last[-1:] in _BEFORE_MENTION
        return Verdict.CLOSED_BY_KEY if behind[0] is Tag.VALUE_OPEN and not is_mention else _Doubt.DATA


def _is_gap_so_far(text: str, *, closed: bool) -> bool:
    """Layout, or the start of it: a lone backslash may become the two characters \\n unless the text is closed."""
    return is_gap(text) or (not closed and text.endswith("\\") and is_gap(text[:-1]))


def _core_so_far(text: str) -> str:
    """The word in `text` without layout around it, of which the last may be half written."""
    return strip_gap(text.removesuffix("\\"))
