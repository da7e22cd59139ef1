"""Token bytes to final text: whole UTF-8 characters, and nothing that may still turn out to be a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was met: `text` is what came before it."""

    text: str
    stop_text: str


class StopScanner:
    """Finds the stop string that is complete first; of those completed by the same character, the longest.

    That rule makes the result independent of how the text was cut into pieces. Held back is the longest tail that
    could still begin a stop string, so each character is looked at a bounded number of times.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    @property
    def n_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str | Stopped:
        """The text that is certain now, or Stopped."""
        if not self._stops:
            return text
        buffer = self._held + text
        first = min(
            ((start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0),
            default=None,
        )
        if first is not None:
            _, start, stop = first
            self._held = ""
            return Stopped(buffer[:start], stop)
        n_held = self._n_possible_start(buffer)
        cut = len(buffer) - n_held
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """What was held back: at the end of the text it is text."""
        held, self._held = self._held, ""
        return held

    def _n_possible_start(self, buffer: str) -> int:
        for n in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-n:]
            if any(stop.startswith(tail) for stop in self._stops):
                return n
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became final, and how many of the tokens fed so far belong to it (each token is counted once)."""

    text: str
    n_tokens: int
    stop_text: str | None = None


class TextStream:
    """The text of one job. Feed the bytes of each token in turn.

    Bytes that are not UTF-8 become U+FFFD; a character cut in half at the very end is dropped, because it would never
    have been written by a model that went on.
    """

    __slots__ = ("_decoder", "_n_chars", "_scanner", "_starts")

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._scanner = StopScanner(stops)
        self._n_chars = 0  # final characters so far
        self._starts: list[int] = []  # where the text of each token not yet given away begins, in characters

    @property
    def within_character(self) -> bool:
        """The last token ended in the middle of a character."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token_bytes: bytes) -> Piece:
        self._starts.append(self._n_chars + self._scanner.n_held)
        text = self._decoder.decode(token_bytes)
        match self._scanner.feed(text):
            case Stopped(before, stop_text):
                end = self._n_chars + len(before)
                # Tokens that lie wholly in the stop string are not part of the answer.
                n_tokens = sum(1 for start in self._starts if start < end)
                self._n_chars = end
                self._starts.clear()
                return Piece(before, n_tokens, stop_text)
            case final:
                return self._release(final)

    def finish(self) -> Piece:
        """The rest, when the text ends without a stop string."""
        piece = self._release(self._scanner.flush())
        n_tokens = piece.n_tokens + len(self._starts)
        self._starts.clear()
        return Piece(piece.text, n_tokens)

    def _release(self, final: str) -> Piece:
        self._n_chars += len(final)
        if not final:
            return Piece("", 0)
        n_tokens = len(self._starts)
        self._starts.clear()
        return Piece(final, n_tokens)
