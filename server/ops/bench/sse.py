"""Reads a stream of server-sent events, whatever pieces its bytes come in."""

from __future__ import annotations


class EventReader:
    """Yields the data of each event; comments (keep-alives) and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The events that are complete now, in order."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[len(b"data:") :].removeprefix(b" "))
        return events
