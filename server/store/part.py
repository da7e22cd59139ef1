"""The bytes of one file while they come: NAME.part, written at any place by several threads, and a state file that says
which ranges of it are there, so that another process can go on after kill -9 or a power failure.

The state makes two claims. `written` ranges have been handed to the kernel: they survive the death of the process, not
of the machine, so they count only while the machine has not been started again (`boot`). `synced` ranges were on the
disk before the claim was written. Bytes come first and the claim after them, always; a state file is replaced as a
whole and carries a checksum, so what cannot be read claims nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from server.store.spans import Span, Spans

WORK_FOLDER = ".fetch"  # beside the files: states, locks, sums

CLAIM_EVERY_BYTES = 8 << 20  # the most that a killed process has to get again, but for what was on its way
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Identity(msgspec.Struct, frozen=True):
    """Which bytes these are. `etag`: the SHA-256 of the whole file, where the hub tells it, else the hub's own mark."""

    size: int
    etag: str
    revision: str


class _State(msgspec.Struct, frozen=True):
    identity: Identity
    boot: str
    written: tuple[Span, ...]
    synced: tuple[Span, ...]


class Part:
    """Made by `open_part`; several threads may use it. Every method may raise OSError."""

    def __init__(self, target: Path, identity: Identity, boot: str, claim_every_bytes: int) -> None:
        self.target = target
        self.identity = identity
        self.path = part_path(target)
        self.grown = threading.Condition()  # notified when bytes were added; guards what is below
        self._state_file = _state_path(target)
        self._boot = boot
        self._claim_every_bytes = claim_every_bytes
        self._written = Spans()
        self._synced = Spans()
        self._unclaimed = 0
        self._unsynced = 0
        self._saving = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take_over(self, written: Spans, synced: Spans) -> None:
        """Trust these ranges of what the file holds already; all else is to be written."""
        length = os.fstat(self._file).st_size
        if length < self.identity.size:
            written.remove(length, self.identity.size)
            synced.remove(length, self.identity.size)
        with self.grown:
            self._written, self._synced = written, synced
        os.ftruncate(self._file, self.identity.size)
        self._save(durable=False)

    def replace_by(self, file: Path) -> None:
        """Take this file, which was got in another way and is whole, as the part."""
        self.forget()
        os.close(self._file)
        file.replace(self.path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.take_over(Spans([(0, self.identity.size)]), Spans())

    @property
    def n_bytes(self) -> int:
        """How many bytes are there."""
        with self.grown:
            return self._written.n_bytes

    @property
    def unsynced_bytes(self) -> int:
        return self._unsynced

    def missing(self) -> list[Span]:
        with self.grown:
            return self._written.missing(self.identity.size)

    def frontier(self, at: int) -> int:
        """Up to where the bytes from `at` on are there without a gap. Call it with `grown` held."""
        return self._written.frontier(at)

    def write(self, at: int, data: memoryview) -> int:
        """Returns how many of the bytes were not there before."""
        n = len(data)
        done = 0
        while done < n:
            done += os.pwrite(self._file, data[done:], at + done)
        with self.grown:
            new = self._written.add(at, at + n)
            self._unclaimed += new
            self._unsynced += new
            due = self._unclaimed >= self._claim_every_bytes
            if due:
                self._unclaimed = 0
            self.grown.notify_all()
        if due:
            self._save(durable=False)
        return new

    def read(self, at: int, into: memoryview) -> int:
        return os.preadv(self._file, [into], at)

    def sync(self) -> None:
        """Bring what is written to the disk, then claim so."""
        with self.grown:
            covered = self._written.copy()
            self._unsynced = 0
        _sync_data(self._file)
        with self.grown:
            self._synced = covered
        self._save(durable=True)

    def forget(self, span: Span | None = None) -> None:
        """Claim no longer that this range (None: any) is there."""
        with self.grown:
            start, stop = span or (0, self.identity.size)
            self._written.remove(start, stop)
            self._synced.remove(start, stop)
        self._save(durable=True)

    def finish(self) -> None:
        """All is there and right: give the file its name."""
        os.fsync(self._file)
        self.close()
        self.path.replace(self.target)
        sync_folder(self.target.parent)
        self._state_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Also writes the last claim, if it can, when the file is not finished. May be called twice."""
        if self._file >= 0:
            if self._unclaimed:
                with suppress(OSError):  # a full disk: what is not claimed comes again
                    self._save(durable=False)
            os.close(self._file)
            self._file = -1

    def _save(self, *, durable: bool) -> None:
        with self._saving:
            with self.grown:
                state = _State(self.identity, self._boot, tuple(self._written), tuple(self._synced))
            write_checked(self._state_file, msgspec.json.encode(state), durable=durable)


def open_part(
    target: Path, identity: Identity, *, boot: str | None = None, claim_every_bytes: int = CLAIM_EVERY_BYTES
) -> tuple[Part, str | None]:
    """The part of a file, with what an earlier process left of it. The text says why something that was left is of no
    use, if so."""
    boot = boot_id() if boot is None else boot
    work_folder(target).mkdir(parents=True, exist_ok=True)
    left_over = part_path(target).exists()
    part = Part(target, identity, boot, claim_every_bytes)
    state = _read_state(_state_path(target))
    why: str | None = None
    written: tuple[Span, ...] = ()
    synced: tuple[Span, ...] = ()
    if state is None:
        why = "the record of what is there is missing or damaged" if left_over else None
    elif (state.identity.size, state.identity.etag) != (identity.size, identity.etag):
        why = f"it has changed at the hub since revision {state.identity.revision[:12]}"
    else:
        same_boot = state.boot == boot and boot != ""
        synced = state.synced
        written = state.written if same_boot else synced
    part.take_over(Spans(written), Spans(synced))
    return part, why


def part_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def bytes_held(target: Path) -> int:
    """How much of the disk the part of a file has already. Raises OSError."""
    try:
        in_blocks = part_path(target).stat().st_blocks * 512
    except FileNotFoundError:
        return 0
    state = _read_state(_state_path(target))  # blocks may lag behind what was written
    return max(in_blocks, Spans(state.written).n_bytes if state else 0)


def forget_state(target: Path) -> None:
    """Whatever an earlier process said of a part is no longer true."""
    _state_path(target).unlink(missing_ok=True)


def _state_path(target: Path) -> Path:
    return work_folder(target) / f"{target.name}.state"


def work_folder(target: Path) -> Path:
    return target.parent / WORK_FOLDER


def boot_id() -> str:
    """Changes with every start of the machine; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def write_checked(file: Path, content: bytes, *, durable: bool) -> None:
    """Replace a file as a whole, with a checksum in its first line; `durable`: through to the disk."""
    temporary = file.with_name(f"{file.name}.new")
    with open(temporary, "wb") as out:
        out.write(b"%08x\n" % zlib.crc32(content))
        out.write(content)
        if durable:
            out.flush()
            os.fsync(out.fileno())
    temporary.replace(file)
    if durable:
        sync_folder(file.parent)


def read_checked(file: Path) -> bytes | None:
    """What write_checked wrote; None when there is nothing, or something else."""
    try:
        first, _, content = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if first == b"%08x" % zlib.crc32(content) else None


def _sync_data(file: int) -> None:
    if sys.platform == "linux":
        os.fdatasync(file)
    else:
        os.fsync(file)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_state(file: Path) -> _State | None:
    content = read_checked(file)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=_State)
    except (msgspec.DecodeError, ValueError):
        return None


class Syncer(threading.Thread):
    """Brings a part to the disk now and then, beside the threads that write it."""

    def __init__(self, part: Part, on_error: Callable[[OSError], None], *, every_bytes: int, every_s: float) -> None:
        super().__init__(name="sync", daemon=True)
        self._part = part
        self._on_error = on_error
        self._every_bytes = every_bytes
        self._every_s = every_s
        self._ending = threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self._ending.wait(0.05):
            unsynced = self._part.unsynced_bytes
            if unsynced >= self._every_bytes or (unsynced and time.monotonic() - last >= self._every_s):
                try:
                    self._part.sync()
                except OSError as error:
                    self._on_error(error)
                    return
                last = time.monotonic()

    def stop(self) -> None:
        self._ending.set()
        self.join()
