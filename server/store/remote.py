"""A file at the hub, to be read in places without fetching it: for headers, which say what a model needs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Self

from server.errors import FetchError
from server.store.http_range import Getter, Link, Refused, Source, TryAgain

_TRIES = 5


class RemoteReader:
    """Has the seek and read that server.gguf.read_header_from asks for. One connection, kept open; close it. Raises
    FetchError when the file cannot be had."""

    def __init__(self, source: Source, *, timeout_s: float = 30.0, sleep: Callable[[float], None] = time.sleep) -> None:
        self._source = source
        self._getter = Getter(Link(source), timeout_s=timeout_s)
        self._sleep = sleep
        self._at = 0
        self.n_read = 0  # bytes that came over the line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int, /) -> bytes:
        """Fewer bytes than asked for only at the end of the file."""
        stop = min(self._at + size, self._source.size)
        if size <= 0 or self._at >= stop:
            return b""
        buffer = bytearray(stop - self._at)
        n, tries = 0, 0
        while n < len(buffer):
            try:
                n += self._read_once(memoryview(buffer)[n:], self._at + n)
            except TryAgain as trouble:
                tries += 1
                if tries == _TRIES:
                    raise FetchError(f"{self._source.name} cannot be read at the hub: {trouble.reason}") from None
                self._sleep(2.0 ** (tries - 1) if trouble.after_s is None else min(trouble.after_s, 60.0))
            except Refused:
                raise FetchError(
                    f"{self._source.name} cannot be read in places at this hub; fetch it, and give its path"
                ) from None
        self._at = stop
        return bytes(buffer)

    def _read_once(self, into: memoryview, at: int) -> int:
        """What came before anything went wrong."""
        answer = self._getter.get(at, at + len(into))
        if answer.whole and at > 0:
            raise TryAgain("the server sends whole files only")
        n = 0
        try:
            while n < len(into):
                n += answer.read_into(into[n:])
        except TryAgain:
            if n == 0:
                raise
        self.n_read += n
        return n

    def close(self) -> None:
        self._getter.close()
