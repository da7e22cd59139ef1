"""The folder of states on disk: one server's alone, with a sub-folder for each model and its settings."""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from server.engine.identity import Identity
from server.engine.state_file import TEMPORARY, Head, StateFileError, read_head
from server.errors import ConfigError

log = logging.getLogger(__name__)

ENDING = ".state"
_LOCK = "lock"
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """A file in the folder. `head` None: of another model or other settings."""

    path: Path
    n_bytes: int
    modified_ns: int
    head: Head | None


def on_disk(n_bytes: int) -> int:
    """Bytes that a file takes, in whole blocks."""
    return -(-n_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def state_name(tokens: Sequence[int], start: int) -> str:
    """Of the file for these tokens: the same ones have one file."""
    numbers = array("I", [start, *tokens])
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:32] + ENDING


class DiskFolder:
    """Locked from `open` to `close`, or to the end of the process."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> DiskFolder:
        """Raises ConfigError when it cannot be used, or another server uses it."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = FileLock(path / _LOCK, thread_local=False)
            lock.acquire(blocking=False)
        except Timeout:
            raise ConfigError(
                f"--cache-disk: another server uses the folder '{path}'; give each server a folder of its own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--cache-disk: the folder '{path}' cannot be written ({error.strerror or error}); give one that this "
                f"user may write to"
            ) from None
        return cls(path, lock)

    def close(self) -> None:
        self._lock.release()

    def section(self, identity: Identity) -> Path:
        """The sub-folder for these states. Raises ConfigError."""
        section = self.path / identity.name
        try:
            section.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--cache-disk: '{section}' cannot be made ({error.strerror or error})") from None
        return section

    def scan(self, identity: Identity) -> Iterator[Found]:
        """All states, headers only. What cannot be used is removed: files that were never finished, damaged ones."""
        for section in sorted(self.path.iterdir()):
            if not section.is_dir() or section.is_symlink():
                continue
            ours = section.name == identity.name
            for file in sorted(section.iterdir()):
                if file.name.endswith(TEMPORARY):
                    remove(file)
                elif file.name.endswith(ENDING):
                    found = _look_at(file, identity if ours else None)
                    if found is not None:
                        yield found
            if not ours:
                with suppress(OSError):  # not empty
                    section.rmdir()


def _look_at(file: Path, identity: Identity | None) -> Found | None:
    try:
        status = file.lstat()
        head = read_head(file, identity) if identity is not None else None
    except StateFileError as error:
        log.warning("'%s' is removed: %s", file, error)
        remove(file)
        return None
    except OSError as error:
        log.warning("'%s' is left alone: %s", file, error.strerror or error)
        return None
    return Found(file, on_disk(status.st_size), status.st_mtime_ns, head)


def remove(file: Path) -> None:
    with suppress(FileNotFoundError):
        try:
            file.unlink()
        except OSError as error:
            log.warning("'%s' cannot be removed: %s", file, error.strerror or error)


def mark_used(file: Path, when_ns: int) -> None:
    """The order of use must survive a restart."""
    with suppress(OSError):
        os.utime(file, ns=(when_ns, when_ns))
