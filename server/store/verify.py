"""Whether the files of a model are what they should be, down to the last byte.

First the quick checks of every start (server/store/quick.py), then every byte is read once: its SHA-256 against what is
known about the file (server/store/expected.py), and long stretches of zeros where weights should be. Zeros count only
where no sum vouches for the file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from server.errors import ConfigError, ModelFileError
from server.store.digest import Digest, DigestCache, Stamp, digest_files, stamp_of
from server.store.expected import Expected, Knowledge, gather
from server.store.faults import Fault, FaultKind, unreadable
from server.store.holes import WeightMap, vocabulary_size, zero_faults
from server.store.quick import Inspection, inspect_model, wrong_size
from server.store.recipes import Recipe
from server.store.shards import is_model_file, siblings, unfinished_files

_DEPTH = 4  # folders below the one that was named: a bundle has data/model/QUANT


class FileState(StrEnum):
    OK = "ok"  # its sum is the one it should be
    WHOLE = "whole"  # nothing wrong, but nobody said what its sum should be
    CHECKED = "checked"  # quick checks only
    BAD = "bad"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class FileReport:
    """`sha256` is what was read, `expected` what should be; `kept` says that the sum is from an earlier run."""

    file: Path
    size_bytes: int | None
    state: FileState
    sha256: str | None
    expected: Expected | None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    path: Path
    files: tuple[FileReport, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Progress:
    """Told while bytes are read: first the files with their sizes, then bytes as they are read, from any thread."""

    begin: Callable[[Sequence[tuple[Path, int]]], None] = lambda _files: None
    advance: Callable[[Path, int], None] = lambda _file, _n_bytes: None


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """`again`: read files although their sums are kept. `cache` None: keep none. `n_threads` 0: one for each core."""

    quick: bool = False
    again: bool = False
    n_threads: int = 0
    cache: Path | None = None
    recipes: tuple[Recipe, ...] = ()
    progress: Progress = field(default_factory=Progress)


def verify(path: Path, options: VerifyOptions) -> Report:
    """Look at the model of a file, or at every model in a folder and below it, a bundle for one. Raises ConfigError
    when there is nothing to look at, and ModelFileError for a folder that may not be read."""
    inspections = [inspect_model(file, shapes=False) for file in _model_files(path)]
    files = [shard for inspection in inspections for shard in inspection.shards]
    knowledge = gather([*files, path / "any"] if path.is_dir() else files, options.recipes)
    files += [file for file in knowledge.files if file not in files and path.is_dir()]
    faults = [fault for inspection in inspections for fault in inspection.faults]
    faults += knowledge.faults
    faults += list(_listed_faults(files, knowledge, faults))
    digests: dict[Path, Digest] = {}
    kept: set[Path] = set()
    if not options.quick:
        # A hole may be meant, since some copies make holes of zeros: only the sum can tell, where one is known.
        bad = {fault.file for fault in faults if fault.kind is not FaultKind.HOLE or not knowledge.sum_of(fault.file)}
        for file, digest, was_kept in _digests([file for file in files if file not in bad and file.is_file()], options):
            if isinstance(digest, OSError):
                faults.append(unreadable(file, digest))
                continue
            digests[file] = digest
            kept |= {file} if was_kept else set()
        right = {file for file, digest in digests.items() if digest.sha256 == knowledge.sum_of(file)}
        faults = [fault for fault in faults if fault.kind is not FaultKind.HOLE or fault.file not in right]
        explained = right | {fault.file for fault in faults}
        faults += _content_faults(
            inspections, {file: digest for file, digest in digests.items() if file not in explained}, knowledge
        )
    bad = {fault.file for fault in faults}
    reports = tuple(_file_report(file, bad, digests, kept, knowledge) for file in files)
    return Report(path, reports, tuple(faults), tuple(_notes(reports)))


def _model_files(path: Path) -> list[Path]:
    """One file of every set of shards that the path means."""
    if not path.is_dir():
        if not path.exists() and not path.is_symlink():
            raise ConfigError(f"there is no file or folder '{path}' to verify; check the path")
        return [path]
    found: dict[Path, Path] = {}
    for folder, below, names in os.walk(path, onerror=_refuse):
        depth = len(Path(folder).relative_to(path).parts)
        below[:] = sorted(name for name in below if depth < _DEPTH and not name.startswith("."))
        for file in (Path(folder, name) for name in sorted(names)):
            if is_model_file(file):
                found.setdefault(siblings(file)[0], file)
    if not found and not gather([path / "any"]).files:
        raise ConfigError(f"there is no .gguf file in '{path}' or below it, and no list of files; check the path")
    return list(found.values())


def _refuse(error: OSError) -> NoReturn:
    raise ModelFileError(unreadable(Path(str(error.filename)), error).sentence)


def _listed_faults(files: Sequence[Path], knowledge: Knowledge, faults: Sequence[Fault]) -> Iterator[Fault]:
    """Files that a list names but that are not there, or not of the size that it says."""
    bad = {fault.file for fault in faults}
    lacking = {siblings(fault.file) for fault in faults if fault.kind is FaultKind.MISSING}
    for file in files:
        expected = knowledge.files.get(file)
        if expected is None or file in bad:
            continue
        if not file.is_file():
            if siblings(file) not in lacking:
                cause = f"'{file}' is missing, though {expected.source} has it"
                yield Fault(FaultKind.MISSING, file, cause, expected.remedy)
        elif expected.size_bytes is not None and file.stat().st_size != expected.size_bytes:
            fault = wrong_size(file, file.stat().st_size, expected.size_bytes, expected.source)
            yield fault.with_remedy(expected.remedy)


def _digests(files: Sequence[Path], options: VerifyOptions) -> Iterator[tuple[Path, Digest | OSError, bool]]:
    """Every file's digest, and whether it was kept from an earlier run. New ones are kept."""
    cache = DigestCache(options.cache) if options.cache else None
    stamps: dict[Path, Stamp] = {}
    for file in files:
        digest = cache.get(file) if cache and not options.again else None
        if digest:
            yield file, digest, True
            continue
        try:
            stamps[file] = stamp_of(file)
        except OSError as error:
            yield file, error, False
    options.progress.begin([(file, stamp.size_bytes) for file, stamp in stamps.items()])
    n_threads = options.n_threads or n_cores()
    for file, result in digest_files(list(stamps), n_threads, options.progress.advance):
        if cache and isinstance(result, Digest):
            with contextlib.suppress(OSError):
                if stamp_of(file) == stamps[file]:  # nobody wrote in between
                    cache.put(file, stamps[file], result)
        yield file, result, False


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _content_faults(
    inspections: Sequence[Inspection], digests: dict[Path, Digest], knowledge: Knowledge
) -> Iterator[Fault]:
    """Of files the sums of which are wrong or not known."""
    weights: dict[Path, WeightMap] = {}
    for inspection in inspections:
        n_vocab = vocabulary_size(inspection.headers[0]) if inspection.headers[0] else None
        for shard, header in zip(inspection.shards, inspection.headers, strict=True):
            if header:
                weights[shard] = WeightMap(header, n_vocab)
    for file, digest in digests.items():
        expected = knowledge.files.get(file)
        told = expected.sha256 if expected else None
        zeros = list(zero_faults(file, weights[file], digest.zeros, FaultKind.ZEROS)) if file in weights else []
        yield from (fault.with_remedy(expected.remedy) if expected else fault for fault in zeros)
        if expected and told and not zeros:
            cause = (
                f"'{file}' is not the file that {expected.source} has: the sum of its "
                f"{digest.n_bytes:,} bytes is {digest.sha256[:16]}…, but should be {told[:16]}…"
            )
            yield Fault(FaultKind.WRONG_HASH, file, cause, expected.remedy)


def _file_report(
    file: Path, bad: set[Path], digests: dict[Path, Digest], kept: set[Path], knowledge: Knowledge
) -> FileReport:
    expected = knowledge.files.get(file)
    digest = digests.get(file)
    size = file.stat().st_size if file.is_file() else None
    if size is None:
        state = FileState.MISSING
    elif file in bad:
        state = FileState.BAD
    elif digest is None:
        state = FileState.CHECKED
    else:
        state = FileState.OK if expected and expected.sha256 else FileState.WHOLE
    return FileReport(file, size, state, digest.sha256 if digest else None, expected, file in kept)


def _notes(reports: Sequence[FileReport]) -> Iterator[str]:
    """What is no fault, but good to know."""
    unknown = sum(report.state is FileState.WHOLE for report in reports)
    if unknown:
        files = "one file" if unknown == 1 else f"{unknown} files"
        yield (
            f"nothing says what the sums of {files} should be, so a changed byte would not be noticed: fetch with "
            f"python -m server fetch, which records them, or put a SHA256SUMS of the source beside the files"
        )
    for report in reports:
        for part in unfinished_files(report.file) if report.size_bytes is not None else ():
            yield f"'{part}' is what an interrupted download left, though the file itself is there; remove it"
