"""States of sequences that lost their cells, kept in host memory within a budget of bytes.

An entry is what the cache held for the tokens [start, end) of one path. What came before `start` was held by somebody
else when it was saved, so a common prefix is kept once; to bring a path back, entries are restored one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.backend import State
from server.engine.prefix import PrefixTree

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

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes + _TOKEN_BYTES * len(self.tokens)

    def intact(self) -> bool:
        return checksum_of(self.data) == self.checksum


@dataclass(frozen=True, slots=True)
class Part:
    """A step on the way back: restore the tokens [start, end) from `entry`, which may hold more."""

    entry: Entry
    start: int
    end: int


class HostTier:
    """`limit_bytes` is never exceeded; 0 switches the tier off."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._entries: dict[int, Entry] = {}
        self._tree = PrefixTree()
        self._n_bytes = 0
        self._next_id = 0
        self._clock = 0
        self.n_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def covered(self, tokens: Sequence[int], n_held: int) -> int:
        """How many of `tokens` the tier can bring back, one after the other, where the first `n_held` are there."""
        parts = self.way(tokens, n_held)
        return parts[-1].end if parts else n_held

    def way(self, tokens: Sequence[int], n_held: int) -> list[Part]:
        """The entries that bring back as much as possible of `tokens` where the first `n_held` are there already."""
        places = self._tree.matches(tokens)
        parts: list[Part] = []
        reached = n_held
        while (part := self._next_part(places, reached)) is not None:
            parts.append(part)
            reached = part.end
        return parts

    def _next_part(self, places: list[tuple[int, list[int]]], reached: int) -> Part | None:
        for depth, holders in reversed(places):
            if depth <= reached:
                return None
            for entry_id in holders:
                entry = self._entries[entry_id]
                if entry.start <= reached:
                    return Part(entry, reached, depth)
        return None

    def whole(self, tokens: Sequence[int]) -> Entry | None:
        """The longest entry from 0 on whose whole path is a prefix of `tokens`: for states that cannot be cut."""
        fits = [match.holder for match in self._tree.ends(tokens) if self._entries[match.holder].start == 0]
        return self._entries[fits[-1]] if fits else None

    def touch(self, parts: list[Part]) -> None:
        """They were used: the first entries of a path are kept at least as long as those that build on them."""
        for part in reversed(parts):
            self._clock += 1
            part.entry.last_used = self._clock

    def has_room(self, n_state_bytes: int, n_tokens: int) -> bool:
        """Could a state of this size be kept, if need be in place of others that are not pinned?"""
        pinned = sum(entry.n_bytes for entry in self._entries.values() if entry.pinned)
        return pinned + n_state_bytes + _TOKEN_BYTES * n_tokens <= self.limit_bytes

    def keep(self, tokens: list[int], start: int, data: State, *, pinned: bool = False) -> Entry | None:
        """Take a state in, in place of those it contains and of the least recently used. None: it does not fit."""
        if not self.has_room(data.nbytes, len(tokens)):
            return None
        for match in self._tree.ends(tokens):
            inside = self._entries[match.holder]
            if inside.start >= start and not inside.pinned:
                self.drop(inside)
        self._clock += 1
        entry = Entry(self._next_id, tokens, start, data, checksum_of(data), self._clock, pinned)
        self._next_id += 1
        while self._n_bytes + entry.n_bytes > self.limit_bytes:
            self.drop(min((e for e in self._entries.values() if not e.pinned), key=lambda e: e.last_used))
            self.n_evicted += 1
        self._entries[entry.id] = entry
        self._tree.put(entry.id, tokens)
        self._n_bytes += entry.n_bytes
        return entry

    def drop(self, entry: Entry) -> None:
        if self._entries.pop(entry.id, None) is not None:
            self._tree.remove(entry.id)
            self._n_bytes -= entry.n_bytes


def checksum_of(data: State) -> int:
    """Exclusive or and sum of all 64-bit words: any single wrong byte changes it, at the speed of memory."""
    n_whole = data.nbytes // 8 * 8
    words: NDArray[Any] = data[:n_whole].view(np.uint64)
    rest = int.from_bytes(data[n_whole:].tobytes(), "little")
    xor = int(np.bitwise_xor.reduce(words)) if n_whole else 0
    total = int(np.add.reduce(words, dtype=np.uint64)) if n_whole else 0
    return (xor ^ rest) << 64 | (total + rest) % 2**64
