"""Check sums of a file: its SHA-256, and a CRC for every 16 MiB, which later says where a damaged file is damaged.

`Sums` of a file that came in right are kept beside it, with its size and time, so that it need not be read again.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from server.store.part import WORK_FOLDER, read_checked, write_checked
from server.store.spans import Span

BLOCK_BYTES = 16 << 20


class Sums(msgspec.Struct, frozen=True):
    """`crcs`: CRC-32 of each block of BLOCK_BYTES, the last one shorter."""

    size: int
    sha256: str
    crcs: tuple[int, ...]
    mtime_ns: int = 0


class Summer:
    """Feed it a file's bytes in order."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._sha256 = hashlib.sha256()
        self._crcs: list[int] = []
        self._crc = 0

    def feed(self, data: memoryview) -> None:
        self._sha256.update(data)
        while data:
            room = BLOCK_BYTES - self.n_bytes % BLOCK_BYTES
            piece = data[:room]
            self._crc = zlib.crc32(piece, self._crc)
            self.n_bytes += len(piece)
            if len(piece) == room:
                self._crcs.append(self._crc)
                self._crc = 0
            data = data[room:]

    def sums(self) -> Sums:
        rest = (self._crc,) if self.n_bytes % BLOCK_BYTES else ()
        return Sums(self.n_bytes, self._sha256.hexdigest(), (*self._crcs, *rest))


def sums_of(file: Path) -> Iterator[int | Sums]:
    """Reads a file through: the bytes read so far, again and again, and at last its sums. Raises OSError."""
    summer = Summer()
    buffer = memoryview(bytearray(1 << 20))
    with open(file, "rb", buffering=0) as source:
        while n := source.readinto(buffer):
            summer.feed(buffer[:n])
            yield summer.n_bytes
        mtime_ns = os.fstat(source.fileno()).st_mtime_ns
    yield msgspec.structs.replace(summer.sums(), mtime_ns=mtime_ns)


def differing(old: Sums, new: Sums) -> list[Span]:
    """The blocks of a file that are not as they were, when it was right."""
    spans = []
    for index, crc in enumerate(old.crcs):
        if index >= len(new.crcs) or new.crcs[index] != crc:
            spans.append((index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, old.size)))
    return spans


def keep_sums(file: Path, sums: Sums) -> None:
    """Raises OSError."""
    kept = msgspec.structs.replace(sums, mtime_ns=file.stat().st_mtime_ns)
    folder = file.parent / WORK_FOLDER
    folder.mkdir(exist_ok=True)
    write_checked(folder / f"{file.name}.sums", msgspec.json.encode(kept), durable=True)


def kept_sums(file: Path) -> Sums | None:
    content = read_checked(file.parent / WORK_FOLDER / f"{file.name}.sums")
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Sums)
    except (msgspec.DecodeError, ValueError):
        return None


def is_unchanged(file: Path, sums: Sums) -> bool:
    """By size and time of the last change, as make and rsync judge."""
    try:
        stat = file.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (sums.size, sums.mtime_ns)


def zero_blocks(sums: Sums) -> list[Span]:
    """Blocks that hold nothing but zeros (by their CRC), as those of a file that was only partly written."""
    zeros = zlib.crc32(bytes(BLOCK_BYTES))
    spans = []
    for index, crc in enumerate(sums.crcs):
        start, stop = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, sums.size)
        if crc == (zeros if stop - start == BLOCK_BYTES else zlib.crc32(bytes(stop - start))):
            spans.append((start, stop))
    return spans
