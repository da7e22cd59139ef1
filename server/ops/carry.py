"""Keeps the engine's counters monotone although each engine process starts at zero."""

from __future__ import annotations

import msgspec

from server.engine.messages import Counters

_MAXIMA = frozenset({"n_tokens_max"})


class CounterCarry:
    """Feed it every snapshot's counters; `total` is what all engine processes counted together."""

    def __init__(self) -> None:
        self._gone = Counters()  # of engines that are no more
        self._current = Counters()

    def observe(self, counters: Counters) -> None:
        """A counter that went back means that a new engine is speaking."""
        before, now = msgspec.structs.asdict(self._current), msgspec.structs.asdict(counters)
        if any(now[name] < before[name] for name in now):
            self._gone = _add(self._gone, self._current)
        self._current = counters

    def total(self) -> Counters:
        return _add(self._gone, self._current)


def _add(left: Counters, right: Counters) -> Counters:
    """Sums, but the larger one of the maxima."""
    a, b = msgspec.structs.asdict(left), msgspec.structs.asdict(right)
    return Counters(**{name: max(a[name], b[name]) if name in _MAXIMA else a[name] + b[name] for name in a})
