"""States on disk: what was kept in host memory is written here too, within a limit, and survives a restart.

The way back leads through host memory: a state is read and checked by a thread of its own, put among the entries there,
and restored from there like any other. Everything here happens on the thread of the step loop, but for the work on the
files themselves.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from server.engine import state_file
from server.engine.backend import State
from server.engine.background import Background
from server.engine.disk_folder import DiskFolder, Found, mark_used, on_disk, remove, state_name
from server.engine.host_tier import Entry, HostTier, checksum_of, size_of
from server.engine.identity import Identity
from server.engine.path_index import PathIndex, Step
from server.engine.state_file import StateFileError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DiskEntry:
    """A file that holds the state of the tokens from `start` on. `tokens` are empty where it is of another model."""

    id: int
    tokens: array[int]
    start: int
    path: Path
    n_bytes: int  # on disk
    n_state_bytes: int
    last_used: int
    reading: bool = False

    @property
    def end(self) -> int:
        return len(self.tokens)


DiskPart = Step[DiskEntry]


@dataclass(frozen=True, slots=True)
class DiskStore:
    """What a tier is made of."""

    folder: DiskFolder
    identity: Identity
    limit_bytes: int
    writer: Background
    reader: Background


@dataclass(slots=True)
class DiskCounts:
    """Monotone."""

    written: int = 0
    refused: int = 0  # damaged
    failed: int = 0  # the file system said no


class DiskTier(PathIndex[DiskEntry]):
    """`limit_bytes` holds for the whole folder, other models' files included, and is never exceeded."""

    def __init__(self, store: DiskStore, host: HostTier, *, can_cut: bool, clock: Callable[[], float]) -> None:
        super().__init__()
        self._store = store
        self._section = store.folder.section(store.identity)
        self._host = host
        self._can_cut = can_cut
        self._now = clock
        self._foreign: dict[int, DiskEntry] = {}
        self._pending: deque[Entry] = deque()
        self._writing = 0  # bytes
        self._n_bytes = 0
        self._next_id = 0
        self._read_bytes_per_s = 0.0
        self.counts = DiskCounts()
        for found in sorted(store.folder.scan(store.identity), key=lambda found: found.modified_ns):
            self._add_found(found)
        for entry in self._victims(0) or ():
            remove(entry.path)

    @property
    def limit_bytes(self) -> int:
        return self._store.limit_bytes

    @property
    def n_bytes(self) -> int:
        """What the files take, one that is being written included."""
        return self._n_bytes + self._writing

    @property
    def has_caught_up(self) -> bool:
        return not self._pending and not self._writing

    def seconds_for(self, n_bytes: int) -> float:
        """To read so many; 0 as long as no speed is known."""
        return n_bytes / self._read_bytes_per_s if self._read_bytes_per_s else 0.0

    def _add_found(self, found: Found) -> None:
        head = found.head
        tokens, start, n_state = (head.tokens, head.start, head.n_state_bytes) if head else (array("I"), 0, 0)
        entry = DiskEntry(self._new_id(), tokens, start, found.path, found.n_bytes, n_state, self.tick())
        self._n_bytes += entry.n_bytes
        if head is None:
            self._foreign[entry.id] = entry
        else:
            self.add(entry)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # ── on ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tend(self) -> None:
        """Follow up what the threads have done, and give them more. Once a step."""
        self._store.reader.collect()
        self._store.writer.collect()
        self._hand_over(newest=False)

    def flush(self, deadline: float, *, most: int | None = None) -> None:
        """Write what is pending, the newest first, until it is done, or until `deadline` by the clock."""
        while most is None or most > 0:
            if not self._writing and self._hand_over(newest=True) and most is not None:
                most -= 1
            while self._writing and self._now() < deadline:
                self._store.writer.collect(max(1e-3, deadline - self._now()))
            if self._writing or not self._pending or self._now() >= deadline:
                return

    def close(self) -> None:
        self._store.writer.close()
        self._store.reader.close()
        self._store.folder.close()

    # ── to disk ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, entry: Entry) -> None:
        """Write it when there is time, unless it leaves host memory before."""
        self._pending.append(entry)

    def note_use(self, tokens: list[int]) -> None:
        """A prompt came along: what it passes over is kept longer than what it does not."""
        if self._can_cut:
            self._touch(self.way(tokens, 0))
        elif (entry := self.whole(tokens)) is not None:
            self._touch([Step(entry, 0, entry.end)])

    def _touch(self, parts: list[DiskPart]) -> None:
        self.touch(parts)
        if not parts:
            return
        now_ns = time.time_ns()
        marks = [(part.entry.path, now_ns + i) for i, part in enumerate(reversed(parts))]

        def mark_all() -> None:
            for path, when_ns in marks:
                mark_used(path, when_ns)

        self._store.writer.start(mark_all, lambda future: future.result())

    def _hand_over(self, *, newest: bool) -> bool:
        """Start writing the next pending entry that is worth it. False: there is none."""
        while self._pending and not self._writing:
            entry = self._pending.pop() if newest else self._pending.popleft()
            if entry not in self._host or self._is_here(entry):
                continue
            n_bytes = on_disk(state_file.file_bytes(len(entry.tokens), entry.data.nbytes))
            victims = self._victims(n_bytes)
            if victims is None:
                continue
            entry.busy = True
            self._writing = n_bytes
            path = self._section / state_name(entry.tokens, entry.start)
            gone = [victim.path for victim in victims]
            self._store.writer.start(partial(self._write, path, entry, gone), partial(self._written, path, entry))
            return True
        return False

    def _is_here(self, entry: Entry) -> bool:
        if self._can_cut:
            return self.covered(entry.tokens, entry.start) == entry.end
        whole = self.whole(entry.tokens)
        return whole is not None and whole.end == entry.end

    def _victims(self, n_bytes: int) -> list[DiskEntry] | None:
        """Take out what must go for a file of `n_bytes`. None: it is too large whatever goes."""
        victims: list[DiskEntry] = []
        if n_bytes > self.limit_bytes - sum(entry.n_bytes for entry in self._items.values() if entry.reading):
            return None
        while self.n_bytes + n_bytes > self.limit_bytes:
            files = [entry for entry in (*self._foreign.values(), *self._items.values()) if not entry.reading]
            victims.append(min(files, key=lambda entry: entry.last_used))
            self._forget(victims[-1])
        return victims

    def _write(self, path: Path, entry: Entry, gone: list[Path]) -> None:
        for victim in gone:
            remove(victim)
        state_file.write(path, self._store.identity, entry.tokens, entry.start, entry.data)

    def _written(self, path: Path, entry: Entry, future: Future[None]) -> None:
        entry.busy = False
        n_bytes, self._writing = self._writing, 0
        try:
            future.result()
        except OSError as error:
            self._fail("cannot be written", path, error)
        else:
            self.counts.written += 1
            if self._can_cut:
                for inside in self.inside(entry.tokens, entry.start):
                    if not inside.reading and inside.path != path:
                        self._remove(inside)
            tokens = array("I", entry.tokens)
            n_state = entry.data.nbytes
            self._n_bytes += n_bytes
            self.add(DiskEntry(self._new_id(), tokens, entry.start, path, n_bytes, n_state, self.tick()))
            self.note_use(entry.tokens)

    # ── from disk ────────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, entries: list[DiskEntry]) -> list[DiskEntry]:
        """Read them into host memory, the first ones first, as far as there is room. Those that are on their way."""
        for i, entry in enumerate(entries):
            if entry.reading:
                continue
            n_bytes = size_of(entry.n_state_bytes, entry.end)
            if not self._host.set_aside(n_bytes):
                return entries[:i]
            entry.reading = True
            self._store.reader.start(partial(self._read, entry), partial(self._arrived, entry, n_bytes))
        return entries

    def _read(self, entry: DiskEntry) -> tuple[State, int, float]:
        """State, checksum, seconds."""
        began = self._now()
        head, state = state_file.read(entry.path, self._store.identity)
        if head.tokens != entry.tokens or head.start != entry.start:
            raise StateFileError("it is another one than when the server started")
        return state, checksum_of(state), self._now() - began

    def _arrived(self, entry: DiskEntry, n_bytes: int, future: Future[tuple[State, int, float]]) -> None:
        entry.reading = False
        self._host.give_back(n_bytes)
        try:
            state, checksum, seconds = future.result()
        except StateFileError as error:
            self.counts.refused += 1
            log.warning("'%s' is removed: %s", entry.path, error)
            self._remove(entry)
            return
        except OSError as error:
            self._fail("cannot be read", entry.path, error)
            self._forget(entry)
            return
        self._host.keep(list(entry.tokens), entry.start, state, checksum=checksum, from_disk=True)
        if seconds > 0:
            rate = state.nbytes / seconds
            self._read_bytes_per_s = (self._read_bytes_per_s + rate) / 2 if self._read_bytes_per_s else rate

    # ── books ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _remove(self, entry: DiskEntry) -> None:
        self._forget(entry)
        self._store.writer.start(partial(remove, entry.path), lambda future: future.result())

    def _forget(self, entry: DiskEntry) -> None:
        if self._foreign.pop(entry.id, None) is not None or self.remove(entry):
            self._n_bytes -= entry.n_bytes

    def _fail(self, what: str, path: Path, error: OSError) -> None:
        if not self.counts.failed:
            log.warning("'%s' %s: %s; further failures are only counted", path, what, error.strerror or error)
        self.counts.failed += 1
