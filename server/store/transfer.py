"""Moves one file from the hub into its part: several connections, each taking the next piece that is missing.

Threads: one for each connection, one that hashes the file from its start as far as there is no gap (from the page
cache, while later pieces come), one that brings what was written to the disk. The caller's thread waits, and may be
told to stop at any moment; what has come by then stays.
"""

from __future__ import annotations

import errno
import heapq
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.errors import FetchError
from server.store.http_range import Answer, Getter, Link, Refused, TryAgain
from server.store.pace import Pace
from server.store.part import CLAIM_EVERY_BYTES, Part, Syncer
from server.store.spans import Span
from server.store.sums import Summer, Sums

_READ_BYTES = 256 << 10
_LEAST_PIECE_BYTES = 1 << 20
_HASH_BYTES = 1 << 20
_WINDOWS_BYTES = 32 << 20  # of all connections together: enough for 320 MB/s over 100 ms
_LEAST_WINDOW_BYTES = 256 << 10
_LONGEST_WAIT_S = 60.0
_LONGEST_END_S = 3.0


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """`give_up_s`: how long no byte may come before the fetch ends with an error."""

    connections: int = 8
    bytes_per_s: float | None = None
    piece_bytes: int = 32 << 20
    read_timeout_s: float = 30.0
    first_wait_s: float = 1.0
    give_up_s: float = 900.0
    claim_every_bytes: int = CLAIM_EVERY_BYTES
    sync_every_bytes: int = 512 << 20
    sync_every_s: float = 10.0


@dataclass(slots=True)
class _Piece:
    """What one connection is getting; another one may take its end over, so `stop` can come nearer."""

    at: int
    stop: int


@dataclass(slots=True)
class _Work:
    """What is still to be got, under one lock."""

    lock: threading.Lock
    waiting: list[Span]  # a heap
    going: list[_Piece] = field(default_factory=list)

    def take(self, least: int) -> _Piece | None:
        """The next piece; with none waiting, half of the longest that another connection has before it."""
        with self.lock:
            if self.waiting:
                piece = _Piece(*heapq.heappop(self.waiting))
            else:
                longest = max(self.going, key=lambda piece: piece.stop - piece.at, default=None)
                if longest is None or longest.stop - longest.at < 2 * least:
                    return None
                middle = longest.at + (longest.stop - longest.at) // 2
                piece = _Piece(middle, longest.stop)
                longest.stop = middle
            self.going.append(piece)
            return piece

    def give_back(self, piece: _Piece) -> None:
        with self.lock:
            self.going.remove(piece)
            if piece.at < piece.stop:
                heapq.heappush(self.waiting, (piece.at, piece.stop))


class Transfer:
    """`run` gets all that is missing. `on_trouble` is called by any thread with a reason and the wait that follows."""

    def __init__(
        self, part: Part, link: Link, options: TransferOptions, pace: Pace, on_trouble: Callable[[str, float], None]
    ) -> None:
        self._part = part
        self._link = link
        self._options = options
        self._pace = pace
        self._on_trouble = on_trouble
        self._work = _Work(threading.Lock(), self._pieces())
        self._over = threading.Event()  # all is done, or something ended it
        self._failure: Exception | None = None
        self._summer = Summer()
        self._getters: list[Getter] = []
        self._last_byte_s = time.monotonic()
        self._streaming = threading.Lock()  # held by the one connection that a server without ranges gets
        self._n_ignored = 0
        self.received_bytes = 0

    @property
    def hashed_bytes(self) -> int:
        return self._summer.n_bytes

    def run(self, tick: Callable[[], None], tick_s: float = 0.1) -> Sums:
        """The sums of the whole file. Calls `tick` again and again. Raises FetchError, Refused, OSError, and whatever
        `tick` raises; the part then keeps what has come."""
        n = min(self._options.connections, max(1, len(self._work.waiting)))
        window_bytes = max(_LEAST_WINDOW_BYTES, _WINDOWS_BYTES // n)
        self._getters = [
            Getter(self._link, timeout_s=self._options.read_timeout_s, window_bytes=window_bytes) for _ in range(n)
        ]
        workers = [threading.Thread(target=self._get, args=(each,), daemon=True) for each in self._getters]
        hasher = threading.Thread(target=self._hash, name="hash", daemon=True)
        syncer = Syncer(
            self._part,
            self._fail,
            every_bytes=self._options.sync_every_bytes,
            every_s=self._options.sync_every_s,
        )
        for thread in (*workers, hasher, syncer):
            thread.start()
        try:
            while not self._over.wait(tick_s):
                tick()
        finally:
            self._over.set()
            for getter in self._getters:
                getter.stop()
            with self._part.grown:
                self._part.grown.notify_all()
            hasher.join()
            for thread in workers:
                thread.join(_LONGEST_END_S)  # one that is just connecting writes nothing any more
            syncer.stop()
        if self._failure is not None:
            raise self._failure
        return self._summer.sums()

    def _pieces(self) -> list[Span]:
        """In order, which makes it a heap; smaller ones where there would else be too few for all connections."""
        missing, options = self._part.missing(), self._options
        share = sum(stop - start for start, stop in missing) // (2 * options.connections)
        size = min(options.piece_bytes, max(_LEAST_PIECE_BYTES, share))
        return [(at, min(at + size, stop)) for start, stop in missing for at in range(start, stop, size)]

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._over.is_set():
            self._failure = error
        self._over.set()

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, getter: Getter) -> None:
        """One connection's life."""
        buffer = memoryview(bytearray(_READ_BYTES))
        failures = 0
        try:
            while not self._over.is_set():
                piece = self._work.take(min(_LEAST_PIECE_BYTES, self._options.piece_bytes))
                if piece is None:
                    return
                before = self.received_bytes
                try:
                    if not self._get_piece(getter, piece, buffer):
                        return
                    failures = 0
                except TryAgain as trouble:
                    if not self._over.is_set():
                        failures = 1 if self.received_bytes > before else failures + 1
                        self._wait(trouble, failures)
                finally:
                    self._work.give_back(piece)
        except (FetchError, Refused, OSError) as error:
            self._fail(error)
        finally:
            getter.close()

    def _get_piece(self, getter: Getter, piece: _Piece, buffer: memoryview) -> bool:
        """False: this connection is not needed any more, because the server sends whole files only."""
        answer = getter.get(piece.at, piece.stop)
        if not answer.whole:
            self._read(answer, piece, buffer)
            return True
        self._n_ignored += 1
        if self._n_ignored == 1 and piece.at > 0:
            raise TryAgain("the server sent the file from its start instead of the range that was asked for", 0.0)
        if not self._streaming.acquire(blocking=False):
            return False
        try:
            self._read(answer, _Piece(0, self._part.identity.size), buffer)
            with self._work.lock:
                self._work.waiting.clear()
            piece.at = piece.stop
        finally:
            self._streaming.release()
        return True

    def _read(self, answer: Answer, piece: _Piece, buffer: memoryview) -> None:
        """Until the piece's end, which may come nearer."""
        view = buffer[: self._pace.piece(len(buffer))]
        while piece.at < piece.stop and not self._over.is_set():
            n = answer.read_into(view)
            if n == 0 or self._over.is_set():
                return
            self._part.write(piece.at, view[:n])
            piece.at += n
            self.received_bytes += n
            self._last_byte_s = time.monotonic()
            debt_s = self._pace.debt_s(n)
            if debt_s > 0:
                self._over.wait(debt_s)

    def _wait(self, trouble: TryAgain, failures: int) -> None:
        """Longer from time to time, or as long as the server says. Raises FetchError when it is hopeless."""
        options = self._options
        wait_s = min(options.first_wait_s * 2 ** (failures - 1), _LONGEST_WAIT_S) * random.uniform(0.75, 1.25)
        if trouble.after_s is not None:
            wait_s = trouble.after_s
        silent_s = time.monotonic() - self._last_byte_s
        if silent_s + wait_s > options.give_up_s:
            asked = f", which asks to wait {wait_s:.0f} s" if trouble.after_s else ""
            raise FetchError(
                f"{self._part.target.name}: no byte came for {silent_s:.0f} s ({trouble.reason}{asked}); run the same "
                f"command later to go on from {self._part.n_bytes:,} of {self._part.identity.size:,} bytes"
            )
        self._on_trouble(trouble.reason, wait_s)
        self._over.wait(wait_s)

    # ── hashing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hash(self) -> None:
        part, summer = self._part, self._summer
        buffer = memoryview(bytearray(_HASH_BYTES))
        try:
            while summer.n_bytes < part.identity.size:
                with part.grown:
                    part.grown.wait_for(lambda: self._over.is_set() or part.frontier(summer.n_bytes) > summer.n_bytes)
                    ready = part.frontier(summer.n_bytes) - summer.n_bytes
                if self._over.is_set():
                    return
                n = part.read(summer.n_bytes, buffer[: min(ready, len(buffer))])
                if n == 0:
                    raise OSError(errno.EIO, "the file became shorter while it was written", str(part.path))
                summer.feed(buffer[:n])
        except OSError as error:
            self._fail(error)
        self._over.set()
