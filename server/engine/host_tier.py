"""States of sequences that lost their cells, kept in host memory within a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.backend import State
from server.engine.path_index import PathIndex, Step

_TOKEN_BYTES = 8  # of a token in the list of an entry


@dataclass(slots=True, eq=False)
class Entry:
    """`tokens` is the whole path, `data` the state of those from `start` on."""

    id: int
    tokens: list[int]
    start: int
    data: State
    checksum: int
    last_used: int
    pinned: bool = False  # a job that was swapped out comes back for it
    busy: bool = False  # it is being written to disk
    from_disk: bool = False  # read from there, and not used since

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        return size_of(self.data.nbytes, len(self.tokens))

    @property
    def stays(self) -> bool:
        return self.pinned or self.busy

    def intact(self) -> bool:
        return checksum_of(self.data) == self.checksum


Part = Step[Entry]


class HostTier(PathIndex[Entry]):
    """`limit_bytes` is never exceeded; 0 switches the tier off. `can_cut`: of a state a part may be used, so that a
    longer one takes the place of those it contains."""

    def __init__(self, limit_bytes: int, *, can_cut: bool = True) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self._can_cut = can_cut
        self._n_bytes = 0
        self._next_id = 0
        self.n_evicted = 0

    @property
    def n_bytes(self) -> int:
        """What entries take, and what is set aside for some that are on their way."""
        return self._n_bytes

    def has_room(self, n_state_bytes: int, n_tokens: int) -> bool:
        """Could a state of this size be kept, if need be in place of others that need not stay?"""
        return self._fits(size_of(n_state_bytes, n_tokens))

    def keep(
        self,
        tokens: list[int],
        start: int,
        data: State,
        *,
        pinned: bool = False,
        checksum: int | None = None,
        from_disk: bool = False,
    ) -> Entry | None:
        """Take a state in, in place of those it contains and of the least recently used. None: it does not fit."""
        if not self.has_room(data.nbytes, len(tokens)):
            return None
        for inside in self.inside(tokens, start):
            if not inside.stays and (self._can_cut or inside.end == len(tokens)):
                self.drop(inside)
        checksum = checksum_of(data) if checksum is None else checksum
        entry = Entry(self._next_id, tokens, start, data, checksum, self.tick(), pinned, from_disk=from_disk)
        self._next_id += 1
        self._make_room(entry.n_bytes)
        self.add(entry)
        self._n_bytes += entry.n_bytes
        return entry

    def drop(self, entry: Entry) -> None:
        if self.remove(entry):
            self._n_bytes -= entry.n_bytes

    def set_aside(self, n_bytes: int) -> bool:
        """Room for an entry that is on its way, until `give_back`. False: there is none."""
        if not self._fits(n_bytes):
            return False
        self._make_room(n_bytes)
        self._n_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        self._n_bytes -= n_bytes

    def _fits(self, n_bytes: int) -> bool:
        can_go = sum(entry.n_bytes for entry in self._items.values() if not entry.stays)
        return self._n_bytes - can_go + n_bytes <= self.limit_bytes

    def _make_room(self, n_bytes: int) -> None:
        while self._n_bytes + n_bytes > self.limit_bytes:
            self.drop(min((e for e in self._items.values() if not e.stays), key=lambda e: e.last_used))
            self.n_evicted += 1


def size_of(n_state_bytes: int, n_tokens: int) -> int:
    """Bytes of host memory that an entry takes."""
    return n_state_bytes + _TOKEN_BYTES * n_tokens


def checksum_of(data: State) -> int:
    """Exclusive or and sum of all 64-bit words: any single wrong byte changes it, at the speed of memory."""
    n_whole = data.nbytes // 8 * 8
    words: NDArray[Any] = data[:n_whole].view(np.uint64)
    rest = int.from_bytes(data[n_whole:].tobytes(), "little")
    xor = int(np.bitwise_xor.reduce(words)) if n_whole else 0
    total = int(np.add.reduce(words, dtype=np.uint64)) if n_whole else 0
    return (xor ^ rest) << 64 | (total + rest) % 2**64
