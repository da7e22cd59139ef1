"""Writes tool calls out as deltas. A call is sent when it is complete, but a long argument that is a string for certain
is sent on while it comes, so that memory stays flat and a client sees progress."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping

from server.chat.json_text import quote, quote_part
from server.chat.messages import Delta, ToolCallArguments, ToolCallStart
from server.chat.toolbox import Toolbox

STREAM_FROM = 2048  # characters of a string argument from which on it is sent while it comes


class CallWriter:
    """Numbers the calls of one answer and puts their deltas into `out`."""

    def __init__(self, out: list[Delta], new_id: Callable[[], str], n_calls: int = 0) -> None:
        self.out = out
        self.new_id = new_id
        self.n_calls = n_calls
        self.n_complete = n_calls

    def whole(self, name: str, arguments: str) -> None:
        self.begin(name)
        self.end(arguments)

    def begin(self, name: str) -> None:
        self.out.append(ToolCallStart(self.n_calls, self.new_id(), name))
        self.n_calls += 1

    def fragment(self, text: str) -> None:
        self.out.append(self.next_fragment(text))

    def next_fragment(self, text: str) -> ToolCallArguments:
        return ToolCallArguments(self.n_calls - 1, text)

    def end(self, text: str) -> None:
        self.fragment(text)
        self.n_complete += 1

    def abandon(self) -> None:
        self.out.append(ToolCallArguments(self.n_calls - 1, "", abandons=True))


class PendingCall:
    """Name and arguments of the call that is being read. Values come piece by piece, between start and end."""

    def __init__(self, toolbox: Toolbox, writer: CallWriter) -> None:
        self.is_sent = False  # a part was, so the call cannot be taken back
        self.is_damaged = False  # an argument could not be read
        self.name = ""
        self._toolbox = toolbox
        self._writer = writer
        self._schema = toolbox.schema("")
        self._pairs: dict[str, str] = {}  # not sent yet
        self._sent: set[str] = set()
        self._key = ""
        self._text = io.StringIO()
        self._room = 0  # characters of this value that may still be kept
        self._streams = False  # this value is being sent on
        self._skips = False  # this value is of a key that was already sent

    @property
    def is_empty(self) -> bool:
        return not self._pairs and not self._sent

    @property
    def declared(self) -> frozenset[str]:
        return self._schema.declared

    @property
    def needs_arguments(self) -> bool:
        return bool(self._schema.required)

    def begin(self, name: str, pairs: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._schema = self._toolbox.schema(name)
        self._pairs.update(pairs or {})

    def is_open_key(self, text: str) -> bool:
        """A key that the tool declares and the call does not have yet."""
        return text in self.declared and text != self._key and text not in self._pairs and text not in self._sent

    def may_become_open_key(self, text: str) -> bool:
        return any(key.startswith(text) and self.is_open_key(key) for key in self.declared)

    def start_value(self, key: str) -> None:
        self._key = key
        self._text = io.StringIO()
        self._skips = key in self._sent
        self._room = 0 if self._skips else STREAM_FROM if self._schema.may_stream(key) else sys.maxsize

    def add(self, text: str) -> None:
        if self._streams:
            self._writer.fragment(quote_part(text))
        elif not self._skips:
            self._text.write(text)
            self._room -= len(text)
            if self._room < 0:
                self._send_start_of_value()

    def plain(self, text: str) -> list[Delta] | None:
        """Like `add`, for the fast path: what is to be sent, or None if that needs thought and nothing was done."""
        if self._streams:
            return [self._writer.next_fragment(quote_part(text))]
        if self._room <= len(text):
            return None
        self._room -= len(text)
        self._text.write(text)
        return []

    def end_value(self, *, trims: bool) -> None:
        """`trims`: the closing tag is lost, so a line break at the end is layout."""
        if self._streams:
            self._writer.fragment('"')
            self._streams = False
        elif not self._skips:
            text = self._text.getvalue()
            self.add_pair(self._key, text.rstrip("\r\n") if trims else text)

    def add_pair(self, key: str, raw: str) -> None:
        """A key that comes twice has its last value, but what was sent stays."""
        if not key:
            self.is_damaged = True
        elif key not in self._sent:
            self._pairs[key] = raw

    def complete(self) -> bool:
        """Write the call out. False, and nothing done, if every argument it had was damaged: a call without arguments
        that nobody meant would mislead."""
        if self.is_damaged and self.is_empty:
            return False
        members = self._schema.write_members(self._pairs)
        if self.is_sent:
            self._writer.end(f", {members}}}" if members else "}")
        else:
            self._writer.whole(self.name, "{" + members + "}")
        return True

    def abandon(self) -> None:
        self._writer.abandon()

    def _send_start_of_value(self) -> None:
        self._pairs.pop(self._key, None)
        lead = self._schema.write_members(self._pairs)
        if lead:
            lead += ", "
        if self.is_sent:
            lead = ", " + lead
        else:
            lead = "{" + lead
            self._writer.begin(self.name)
        self._writer.fragment(f'{lead}{quote(self._key)}: "{quote_part(self._text.getvalue())}')
        self._sent.update(self._pairs, [self._key])
        self._pairs = {}
        self._text = io.StringIO()
        self._streams = self.is_sent = True
