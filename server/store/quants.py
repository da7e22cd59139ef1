"""The quants of a repository: its .gguf files sorted into models, each one file or one set of shards."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from server.errors import ConfigError
from server.store.names import HubName

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._])(?P<quant>(?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|BF16|F16|F32|FP16|FP32|FP8|MXFP4(?:_MOE)?|NVFP4)"
    r"(?:[-_](?:XXS|XS|XL|NL|MOE))?)$",
    re.IGNORECASE,
)
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`path` in the repository; `sha256` where the hub tells it; `blob`: the hub's own mark of the content."""

    path: str
    size: int
    sha256: str | None
    blob: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class RemoteQuant:
    """The files of one model, in shard order."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def n_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def n_missing(self) -> int:
        """How many shards of the set are not in the repository."""
        match = _SHARD.fullmatch(self.files[0].name)
        return int(match["count"]) - len(self.files) if match else 0

    def __str__(self) -> str:
        n = len(self.files)
        return f"{self.name} ({size_text(self.n_bytes)}, {n} file{'s' if n > 1 else ''})"


def quants_of(files: Sequence[RemoteFile]) -> tuple[RemoteQuant, ...]:
    """Sorted by size. Projectors and importance matrices are .gguf files too, but no models."""
    sets: dict[str, list[RemoteFile]] = {}
    for file in files:
        name = file.name.lower()
        if not name.endswith(".gguf") or "mmproj" in name or "imatrix" in name:
            continue
        sets.setdefault(_stem(file.path), []).append(file)
    labels = {stem: _label(stem) for stem in sets}
    quants = []
    for stem, members in sets.items():
        label = labels[stem]
        if list(labels.values()).count(label) > 1:
            label = stem.rpartition("/")[2]
        quants.append(RemoteQuant(label, tuple(sorted(members, key=lambda file: file.path))))
    return tuple(sorted(quants, key=lambda quant: (quant.n_bytes, quant.name)))


def choose(name: HubName, files: Sequence[RemoteFile]) -> RemoteQuant:
    """The quant that a name means. Raises ConfigError with the choices when it means none, or more than one."""
    quants = quants_of(files)
    if name.file is not None:
        chosen = next((quant for quant in quants if name.file in (file.path for file in quant.files)), None)
        if chosen is None:
            listed = [file.path for file in files if file.path.lower().endswith(".gguf")]
            raise ConfigError(
                f"there is no file '{name.file}' in {name.repo}; {_few(listed) or 'it has no .gguf file'}"
            )
        return _whole(chosen, name)
    if not quants:
        raise ConfigError(
            f"{name.repo} has no GGUF files; look for a repository with converted ones, usually named {name.repo}-GGUF"
        )
    if name.quant is None:
        if len(quants) == 1:
            return _whole(quants[0], name)
        raise ConfigError(
            f"{name.repo} has {len(quants)} quants; say which, as in {name.repo}:{quants[0].name}: {_all(quants)}"
        )
    asked = name.quant.lower()
    if name.pattern is not None:
        matching = quants_of([file for file in files if fnmatch.fnmatchcase(file.path, name.pattern)])
        if len(matching) == 1:
            return _whole(replace(matching[0], name=name.quant), name)
    found = [quant for quant in quants if quant.name.lower() == asked]
    found = found or [quant for quant in quants if quant.name.lower().endswith((f"-{asked}", f"/{asked}"))]
    match found:
        case [quant]:
            return _whole(quant, name)
        case []:
            raise ConfigError(f"{name.repo} has no quant '{name.quant}'; it has {_all(quants)}")
        case _:
            raise ConfigError(f"'{name.quant}' means more than one quant of {name.repo}: {_all(found)}")


def size_text(n_bytes: float) -> str:
    """As people say it: 433.8 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def _whole(quant: RemoteQuant, name: HubName) -> RemoteQuant:
    if quant.n_missing:
        raise ConfigError(
            f"{name.repo} has only {len(quant.files)} of the {quant.n_missing + len(quant.files)} shards of "
            f"{quant.name}: its upload is not complete, so take another quant or come back later"
        )
    return quant


def _stem(path: str) -> str:
    """The path without number and ending: equal for the shards of a set."""
    match = _SHARD.fullmatch(path)
    return match["stem"] if match else path[: -len(".gguf")]


def _label(stem: str) -> str:
    folder, _, name = stem.rpartition("/")
    match = _QUANT.search(name)
    if folder:
        last = folder.rpartition("/")[2]
        return match["quant"] if match and not _QUANT.search(last) else last
    return match["quant"] if match else name


def _all(quants: Sequence[RemoteQuant]) -> str:
    shown = ", ".join(map(str, quants[:_SHOWN]))
    return shown if len(quants) <= _SHOWN else f"{shown} and {len(quants) - _SHOWN} more"


def _few(paths: Sequence[str]) -> str:
    shown = ", ".join(f"'{path}'" for path in paths[:8])
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return f"it has {shown}{more}" if paths else ""
