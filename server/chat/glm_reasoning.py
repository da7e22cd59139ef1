"""Writes out GLM's reasoning, with the one whitespace rule that differs between generations."""

from __future__ import annotations

import io

from server.chat.glm_answer import BLANKS, BROKEN
from server.chat.messages import Delta, ReasoningDelta

_MOST_RETAINED = 1 << 18


class ReasoningWriter:
    """A block of blanks alone is no reasoning. Otherwise every character counts, unless `trims`: then blanks at either
    edge of all the reasoning are layout."""

    def __init__(self, out: list[Delta], *, trims: bool) -> None:
        self.n_block = 0  # characters of this block that were sent
        self._out = out
        self._trims = trims
        self._uncertain = BLANKS if trims else BROKEN
        self._has_text = False
        self._held: list[str] = []  # blanks that may be layout; half a character that may be the last

    def plain(self, text: str) -> list[Delta] | None:
        """The fast path: `text` to be sent as it is, or None if that needs thought and nothing was done."""
        if self._held or not self.n_block or text[-1] in self._uncertain:
            return None
        self.n_block += len(text)
        return [ReasoningDelta(text)]

    def text(self, text: str) -> None:
        if not text.strip(BLANKS if self._trims or not self.n_block else BROKEN):
            self._held.append(text)
            return
        text = f"{''.join(self._held)}{text}"
        if self._trims and not self._has_text:
            text = text.lstrip()
        body = text.rstrip(self._uncertain)
        self._held = [text[len(body) :]] if len(body) < len(text) else []
        self._send(body)

    def end_block(self) -> None:
        """The block was closed. Blanks at its end may still be inside the reasoning, should another block come."""
        if self._trims:
            self._held = ["".join(self._held)] if self._has_text else []
        else:
            if self.n_block:
                self._send("".join(self._held))
            self._held = []
        self.n_block = 0

    def _send(self, text: str) -> None:
        if text:
            self.n_block += len(text)
            self._has_text = True
            self._out.append(ReasoningDelta(text))


class Retained:
    """Text that was sent as one thing and may turn out to be the other. Past a limit that question is settled."""

    def __init__(self) -> None:
        self._parts = io.StringIO()
        self._n = 0

    def add(self, text: str) -> None:
        self._n += len(text)
        if self._n <= _MOST_RETAINED:
            self._parts.write(text)
        elif self._n - len(text) <= _MOST_RETAINED:
            self._parts = io.StringIO()

    def text(self) -> str | None:
        """All that was added, or None past the limit."""
        return self._parts.getvalue() if self._n <= _MOST_RETAINED else None
