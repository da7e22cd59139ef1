"""SHA-256 of big files, several at once, with the places that are all zero. Sums are kept: a file that has not changed
since (size, times, inode) is not read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import FileIO
from pathlib import Path

import msgspec

from server.store.holes import LEAST_BYTES, Span

# Small enough for a core's own cache, so that hashing reads what reading just wrote; big enough that the interpreter
# lock, taken once for each, costs nothing.
_BUFFER_BYTES = 256 << 10
_MAX_SPANS = 1024


class Digest(msgspec.Struct, frozen=True):
    n_bytes: int
    sha256: str
    zeros: tuple[Span, ...]  # whole blocks of LEAST_BYTES, joined; at most 1,024


class Stamp(msgspec.Struct, frozen=True):
    """What changes when a file does."""

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int


class _Kept(msgspec.Struct, frozen=True):
    path: str
    stamp: Stamp
    digest: Digest


def stamp_of(file: Path) -> Stamp:
    """Raises OSError."""
    stat = file.stat()
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where sums are kept: in the user's cache folder."""
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "glmserve" / "digests"


class DigestCache:
    """One small file for each big one, so that two processes never get into each other's way. A folder that cannot be
    written costs time, not the answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, file: Path) -> Digest | None:
        """The kept digest, if the file is still the one that it was made of."""
        try:
            kept = msgspec.json.decode(self._place(file).read_bytes(), type=_Kept)
            same = kept.path == str(file.resolve()) and kept.stamp == stamp_of(file)
        except (OSError, msgspec.DecodeError):
            return None
        return kept.digest if same else None

    def put(self, file: Path, stamp: Stamp, digest: Digest) -> None:
        place = self._place(file)
        temporary = place.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(_Kept(str(file.resolve()), stamp, digest)))
            temporary.replace(place)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _place(self, file: Path) -> Path:
        return self._folder / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"


def digest_files(
    files: Sequence[Path], n_threads: int, progress: Callable[[Path, int], None]
) -> Iterator[tuple[Path, Digest | OSError]]:
    """Read all files, `n_threads` at a time, the biggest first; each comes as it is done. `progress` gets the number of
    bytes just read, from any thread. Leaving the iterator stops the reading."""
    stop = threading.Event()
    by_size = sorted(files, key=_size, reverse=True)
    with ThreadPoolExecutor(max_workers=max(1, n_threads), thread_name_prefix="digest") as pool:
        jobs = {pool.submit(_digest, file, progress, stop): file for file in by_size}
        try:
            for job in as_completed(jobs):
                try:
                    yield jobs[job], job.result()
                except OSError as error:
                    yield jobs[job], error
        finally:
            stop.set()
            for job in jobs:
                job.cancel()


def digest_file(file: Path) -> Digest:
    """Raises OSError."""
    return _digest(file, lambda _file, _n: None, threading.Event())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _digest(file: Path, progress: Callable[[Path, int], None], stop: threading.Event) -> Digest:
    sha256 = hashlib.sha256()
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    zeros: list[Span] = []
    at = told = 0
    with open(file, "rb", buffering=0) as data:
        if sys.platform == "linux":
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the readahead
        while not stop.is_set():
            n_bytes = _fill(data, view)
            if n_bytes == 0:
                break
            sha256.update(view[:n_bytes])
            for start in range(0, n_bytes - LEAST_BYTES + 1, LEAST_BYTES):
                # Three looks decide for nearly every block of real weights.
                if not (buffer[start] or buffer[start + 4097] or buffer[start + 32769]) and not any(
                    view[start : start + LEAST_BYTES]
                ):
                    _add(zeros, at + start)
            at += n_bytes
            if at - told >= 16 << 20:
                progress(file, at - told)
                told = at
    progress(file, at - told)
    return Digest(at, sha256.hexdigest(), tuple(zeros))


def _fill(data: FileIO, view: memoryview) -> int:
    """Fill the buffer, so that blocks keep their alignment; less only at the end of the file."""
    filled = 0
    while filled < len(view):
        n_bytes = data.readinto(view[filled:])
        if not n_bytes:
            break
        filled += n_bytes
    return filled


def _add(zeros: list[Span], start: int) -> None:
    end = start + LEAST_BYTES
    if zeros and zeros[-1][1] == start:
        zeros[-1] = (zeros[-1][0], end)
    elif len(zeros) < _MAX_SPANS:
        zeros.append((start, end))
