"""States of parts of paths, found by the tokens they hold: what the tiers in host memory and on disk have in common.

An item holds the tokens [start, end) of one path. What came before `start` was held by somebody else when it was saved,
so a common prefix is kept once; to bring a path back, items are restored one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from server.engine.prefix import PrefixTree


class Item(Protocol):
    """`tokens` is the whole path; the item holds those from `start` on."""

    id: int
    start: int
    last_used: int

    @property
    def tokens(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Item)


@dataclass(frozen=True)  # slots would break calls of an alias such as Step[Entry] in Python 3.11
class Step(Generic[T]):
    """A step on the way back: the tokens [start, end) from `entry`, which may hold more."""

    entry: T
    start: int
    end: int


class PathIndex(Generic[T]):
    """Items by id, and a tree over their paths. Keeps no account of bytes."""

    def __init__(self) -> None:
        self._items: dict[int, T] = {}
        self._tree = PrefixTree()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return self._items.get(item.id) is item

    def entries(self) -> list[T]:
        return list(self._items.values())

    def covered(self, tokens: Sequence[int], n_held: int) -> int:
        """How many of `tokens` can be brought back, one after the other, where the first `n_held` are there."""
        parts = self.way(tokens, n_held)
        return parts[-1].end if parts else n_held

    def way(self, tokens: Sequence[int], n_held: int) -> list[Step[T]]:
        """The items that bring back as much as possible of `tokens` where the first `n_held` are there already."""
        places = self._tree.matches(tokens)
        parts: list[Step[T]] = []
        reached = n_held
        while (part := self._next_part(places, reached)) is not None:
            parts.append(part)
            reached = part.end
        return parts

    def _next_part(self, places: list[tuple[int, list[int]]], reached: int) -> Step[T] | None:
        for depth, holders in reversed(places):
            if depth <= reached:
                return None
            for item_id in holders:
                item = self._items[item_id]
                if item.start <= reached:
                    return Step(item, reached, depth)
        return None

    def whole(self, tokens: Sequence[int]) -> T | None:
        """The longest item from 0 on whose whole path is a prefix of `tokens`: for states that cannot be cut."""
        fits = [match.holder for match in self._tree.ends(tokens) if self._items[match.holder].start == 0]
        return self._items[fits[-1]] if fits else None

    def at_once(self, tokens: Sequence[int], *, can_cut: bool) -> Step[T] | None:
        """The one item from 0 on that brings back most of `tokens`; `can_cut`: a part of it may be used."""
        if can_cut:
            return next(iter(self.way(tokens, 0)), None)
        whole = self.whole(tokens)
        return Step(whole, 0, len(whole.tokens)) if whole is not None else None

    def inside(self, tokens: Sequence[int], start: int) -> list[T]:
        """Items that hold nothing but a part of [start, end of tokens) of this path."""
        ends = [self._items[match.holder] for match in self._tree.ends(tokens)]
        return [item for item in ends if item.start >= start]

    def touch(self, parts: Sequence[Step[T]]) -> None:
        """They were used: the first items of a path are kept at least as long as those that build on them."""
        for part in reversed(parts):
            part.entry.last_used = self.tick()

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def add(self, item: T) -> None:
        self._items[item.id] = item
        # slices are compared, and a list equals lists only
        self._tree.put(item.id, item.tokens if isinstance(item.tokens, list) else list(item.tokens))

    def remove(self, item: T) -> bool:
        """False: it was not there any more."""
        if self._items.pop(item.id, None) is None:
            return False
        self._tree.remove(item.id)
        return True
