"""Gets the files of one model into a folder: what is there counts, what is missing comes, what is wrong comes again.

plan_fetch   what is to be got, and whether the disk has room; nothing is changed
fetch        the files, one after the other; after each one it is whole and right, under its own name
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from server.errors import FetchError
from server.store.http_range import Link, Refused
from server.store.hub import Hub, Listing
from server.store.manifest import FileRecord, FileSet, write_manifest
from server.store.pace import Pace
from server.store.part import WORK_FOLDER, Identity, Part, bytes_held, forget_state, open_part, part_path
from server.store.quants import RemoteFile, RemoteQuant, size_text
from server.store.spans import Span, Spans
from server.store.sums import Sums, differing, is_unchanged, keep_sums, kept_sums, sums_of, zero_blocks
from server.store.transfer import Transfer, TransferOptions
from server.store.xet import got_through_xet

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK_POLL_S = 0.2


class Stage(Enum):
    WAITING = auto()  # another process has the file
    CHECKING = auto()  # a file that is here is read through
    GETTING = auto()
    DONE = auto()


@dataclass(slots=True)
class FileProgress:
    """One file's way. In bytes: `n_there` are on disk, `n_received` came just now."""

    file: RemoteFile
    stage: Stage | None = None  # None: not begun
    n_there: int = 0
    n_checked: int = 0
    n_received: int = 0


class Watcher(Protocol):
    """Is told how a fetch goes. All calls come from the thread that fetches."""

    def begin(self, plan: Plan) -> None: ...
    def tick(self, files: Sequence[FileProgress]) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """`n_there`: bytes that need not come. `free_bytes`: what the disk has."""

    listing: Listing
    quant: RemoteQuant
    folder: Path
    n_there: int
    free_bytes: int

    @property
    def n_missing(self) -> int:
        return self.quant.n_bytes - self.n_there


def plan_fetch(listing: Listing, quant: RemoteQuant, folder: Path) -> Plan:
    """Raises FetchError when the disk has no room for what is missing, or the folder cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        n_there = sum(_bytes_on_disk(folder / file.name, file.size) for file in quant.files)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise FetchError(
            f"the folder '{folder}' cannot be used: {error.strerror or error}; choose another with --to or --models-dir"
        ) from None
    plan = Plan(listing, quant, folder, n_there, free_bytes)
    if plan.n_missing > free_bytes:
        raise FetchError(
            f"{listing.repo}:{quant.name} needs {size_text(plan.n_missing)} more, but the disk of '{folder}' has "
            f"{size_text(free_bytes)} free; make room, or choose another folder with --to"
        )
    return plan


@dataclass(slots=True)
class Fetch:
    """`repair`: read every file that is here through, and get what is wrong in it again."""

    plan: Plan
    hub: Hub
    options: TransferOptions
    watcher: Watcher
    repair: bool = False
    pace: Pace = field(init=False)
    progress: list[FileProgress] = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(self.options.bytes_per_s)
        self.progress = [FileProgress(file) for file in self.plan.quant.files]

    def run(self) -> Path:
        """Returns the first file. Raises FetchError; what has come stays, and the next run goes on from there."""
        self.watcher.begin(self.plan)
        for progress in self.progress:
            try:
                self._get_file(progress)
            except OSError as error:
                raise _disk_trouble(error, self.plan.folder / progress.file.name) from error
        self._record()
        self.watcher.tick(self.progress)
        return self.plan.folder / self.plan.quant.files[0].name

    def _record(self) -> None:
        plan = self.plan
        records = tuple(FileRecord(file.name, file.size, file.sha256) for file in plan.quant.files)
        try:
            write_manifest(plan.folder, FileSet(plan.listing.repo, plan.listing.commit, plan.quant.name, records))
        except OSError as error:
            raise _disk_trouble(error, plan.folder) from error

    def _tick(self) -> None:
        self.watcher.tick(self.progress)

    def _get_file(self, progress: FileProgress) -> None:
        target = self.plan.folder / progress.file.name
        with self._alone(target, progress):
            if target.exists() and not self._is_of_older_revision(target, progress.file):
                wrong = self._check(target, progress)
                if wrong is None:
                    self._done(progress)
                    return
                _adopt(target, self._identity(progress.file), wrong)
            self._get_missing(target, progress)
        self._done(progress)

    def _done(self, progress: FileProgress) -> None:
        progress.stage, progress.n_there = Stage.DONE, progress.file.size
        self._tick()

    @contextmanager
    def _alone(self, target: Path, progress: FileProgress) -> Iterator[None]:
        """One process at a time for each file; another one waits."""
        from filelock import FileLock, Timeout

        (target.parent / WORK_FOLDER).mkdir(exist_ok=True)
        lock = FileLock(target.parent / WORK_FOLDER / f"{target.name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            progress.stage = Stage.WAITING
            self.watcher.say(f"{target.name}: another process is getting this file; waiting for it")
            while not lock.is_locked:
                try:
                    lock.acquire(timeout=_LOCK_POLL_S)
                except Timeout:
                    self._tick()
        try:
            yield
        finally:
            lock.release()

    # ── a file that is here already ──────────────────────────────────────────────────────────────────────────────────

    def _is_of_older_revision(self, target: Path, file: RemoteFile) -> bool:
        """It was fetched, nobody has changed it, and the hub has another one now. It stays until that one is here."""
        old = kept_sums(target)
        if old is None or file.sha256 in (None, old.sha256) or not is_unchanged(target, old):
            return False
        self.watcher.say(f"{file.name}: the hub has another version now, which takes the place of the one here")
        return True

    def _check(self, target: Path, progress: FileProgress) -> list[Span] | None:
        """None: it is right. Otherwise the ranges that may be wrong."""
        file = progress.file
        old = kept_sums(target)
        ours = old is not None and file.sha256 in (None, old.sha256) and old.size == file.size
        if ours and old is not None and not self.repair and is_unchanged(target, old):
            return None
        size = target.stat().st_size
        if size != file.size and not (ours or self.repair):
            raise FetchError(
                f"'{target}' is there with {size:,} bytes, but the hub's has {file.size:,}; if it may be replaced, add "
                f"--repair, otherwise choose another folder with --to"
            )
        progress.stage = Stage.CHECKING
        new = self._read_through(target, progress)
        if new.size == file.size and file.sha256 in (None, new.sha256):
            keep_sums(target, new)
            return None
        if not (ours or self.repair):
            raise FetchError(
                f"'{target}' has the size of the hub's file, but other content (SHA-256 {new.sha256[:12]}…, not "
                f"{(file.sha256 or '')[:12]}…); if it may be replaced, add --repair, otherwise choose another folder"
            )
        return self._suspect(target, old if ours else None, new, file)

    def _read_through(self, target: Path, progress: FileProgress) -> Sums:
        for step in sums_of(target):
            if isinstance(step, Sums):
                return step
            progress.n_checked = step
            self._tick()
        raise AssertionError("sums_of ends with sums")

    def _suspect(self, target: Path, old: Sums | None, new: Sums, file: RemoteFile) -> list[Span]:
        if old is not None:
            spans = differing(old, new)
        else:
            spans = zero_blocks(new)
            if new.size < file.size:
                spans.append((new.size, file.size))
        n_bytes = sum(stop - start for start, stop in spans)
        if not spans:
            spans, n_bytes = [(0, file.size)], file.size
        self.watcher.say(f"{file.name}: {size_text(n_bytes)} of {size_text(file.size)} are wrong or missing")
        return spans

    # ── what is missing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _identity(self, file: RemoteFile) -> Identity:
        commit = self.plan.listing.commit
        return Identity(file.size, file.sha256 or file.blob or commit, commit)

    def _get_missing(self, target: Path, progress: FileProgress) -> None:
        file = progress.file
        part, why = open_part(target, self._identity(file), claim_every_bytes=self.options.claim_every_bytes)
        try:
            if why:
                self.watcher.say(f"{file.name}: starts anew, because {why}")
            sums = self._transfer(part, progress)
            if file.sha256 not in (None, sums.sha256):
                self.watcher.say(f"{file.name}: its SHA-256 is wrong; getting it once more")
                part.forget()
                sums = self._transfer(part, progress)
            if file.sha256 not in (None, sums.sha256):
                part.forget()
                raise FetchError(
                    f"{file.name} came twice with a wrong SHA-256 ({sums.sha256[:12]}… instead of "
                    f"{(file.sha256 or '')[:12]}…): a mirror, a proxy or this machine's memory changes bytes; fetch "
                    f"from another HF_ENDPOINT, or on another machine"
                )
            part.finish()
            keep_sums(target, sums)
        finally:
            part.close()

    def _transfer(self, part: Part, progress: FileProgress) -> Sums:
        progress.stage = Stage.GETTING
        link = Link(self.hub.source(self.plan.listing, progress.file))
        transfer = Transfer(part, link, self.options, self.pace, self._trouble(progress.file))
        received_before = progress.n_received

        def tick() -> None:
            progress.n_there = part.n_bytes
            progress.n_checked = transfer.hashed_bytes
            progress.n_received = received_before + transfer.received_bytes
            self._tick()

        try:
            return transfer.run(tick)
        except Refused:
            if not link.has_xet:
                raise FetchError(
                    f"{progress.file.name} is refused by the content network again and again; check the clock of this "
                    f"machine (links expire), or give another HF_ENDPOINT"
                ) from None
            self.watcher.say(f"{progress.file.name}: the plain way is closed; getting it through Xet storage")
            return self._through_xet(part, progress)
        finally:
            tick()

    def _trouble(self, file: RemoteFile) -> Callable[[str, float], None]:
        """Called by any connection: told once, until something else is the matter."""
        told: set[str] = set()

        def tell(reason: str, wait_s: float) -> None:
            if reason not in told:
                told.add(reason)
                again = f"again in {wait_s:.0f} s" if wait_s >= 1 else "again at once"
                self.watcher.say(f"{file.name}: {reason}; {again}")

        return tell

    def _through_xet(self, part: Part, progress: FileProgress) -> Sums:
        file = progress.file
        with got_through_xet(self.hub, self.plan.listing, file, self.plan.folder / WORK_FOLDER / "xet") as got:
            part.replace_by(got)
        progress.n_there = progress.n_received = file.size
        return self._read_through(part.path, progress)


def _adopt(target: Path, identity: Identity, wrong: Sequence[Span]) -> None:
    """Make a part of a file that is partly wrong, so that only this comes again."""
    forget_state(target)
    target.replace(part_path(target))
    part, _ = open_part(target, identity)
    right = Spans([(0, identity.size)])
    for start, stop in wrong:
        right.remove(start, stop)
    part.take_over(right, Spans())
    part.close()


def _bytes_on_disk(target: Path, size: int) -> int:
    """What needs no room any more: the file, or what its part holds in blocks."""
    if target.exists():
        return size if target.stat().st_size == size else 0
    return min(bytes_held(target), size)


def _disk_trouble(error: OSError, target: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(
            f"the disk is full: {target.name} could not be written further in '{target.parent}'; make room and run the "
            f"same command again, it goes on from there"
        )
    reason = error.strerror or os.strerror(error.errno or 0)
    return FetchError(f"'{error.filename or target}' cannot be written: {reason}; check the disk and its rights")
