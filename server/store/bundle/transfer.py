"""Files from one folder to another without a second copy where the file system allows it. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from server.errors import BundleError

_FICLONE = 0x40049409  # linux/fs.h: share all blocks of another file until one of the two is written
_SPARE_BYTES = 64 << 20


class Way(Enum):
    LINKED = "hard-linked"
    CLONED = "cloned"
    COPIED = "copied"


def carry(source: Path, target: Path, *, may_link: bool = True) -> Way:
    """Put the file at `target`, which must not exist: by hard link, by clone, or else by copying.
    Raises BundleError when neither works."""
    source = source.resolve()  # a hub's cache has links in it; their targets are meant
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if may_link:
            with contextlib.suppress(OSError):
                os.link(source, target)
                return Way.LINKED
        if _cloned(source, part):
            way = Way.CLONED
        else:
            shutil.copyfile(source, part)
            way = Way.COPIED
        shutil.copymode(source, part)
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise BundleError(f"'{source}' cannot be copied to '{target}': {error.strerror or error}") from None
    return way


def _cloned(source: Path, target: Path) -> bool:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            return False
        return True


def bytes_to_copy(files: Iterable[Path], folder: Path, *, may_link: bool = True) -> int:
    """What `carry` will need at `folder`: nothing for files of the same file system. Clones are not foreseen."""
    folder = existing(folder)
    device = folder.stat().st_dev
    return sum(file.stat().st_size for file in files if not (may_link and file.stat().st_dev == device))


def require_space(folder: Path, n_bytes: int, what: str) -> None:
    """Raises BundleError, before anything is written, when the file system of `folder` has no room."""
    at = existing(folder)
    free = shutil.disk_usage(at).free
    if n_bytes + _SPARE_BYTES > free:
        raise BundleError(
            f"{what} needs {gib(n_bytes)} at '{folder}', but only {gib(free)} are free on that file system; "
            f"make room, or name a folder on another one"
        )


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):,.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):,.1f} MiB"
