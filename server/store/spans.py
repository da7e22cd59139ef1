"""Sets of byte ranges: what of a file is there, what is missing. A span is (start, stop), stop excluded."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

Span = tuple[int, int]


class Spans:
    """Disjoint spans in order, neighbours joined. To add and to ask costs the logarithm of their number."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans: list[Span] = []
        for start, stop in spans:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> int:
        """Returns how many bytes are new."""
        if not 0 <= start <= stop:
            raise ValueError(f"({start}, {stop}) is no span")
        if start == stop:
            return 0
        # the first that ends at or behind our start, and behind the last that begins at or before our stop
        first = bisect.bisect_left(self._spans, start, key=lambda span: span[1])
        last = bisect.bisect_right(self._spans, stop, key=lambda span: span[0])
        touched = self._spans[first:last]
        joined = (
            (min(start, *(span[0] for span in touched)), max(stop, *(span[1] for span in touched)))
            if touched
            else (start, stop)
        )
        self._spans[first:last] = [joined]
        return joined[1] - joined[0] - sum(b - a for a, b in touched)

    def remove(self, start: int, stop: int) -> None:
        kept = [(a, min(b, start)) for a, b in self._spans if a < start]
        kept += [(max(a, stop), b) for a, b in self._spans if b > stop]
        self._spans = [span for span in kept if span[0] < span[1]]

    @property
    def n_bytes(self) -> int:
        return sum(stop - start for start, stop in self._spans)

    def frontier(self, at: int = 0) -> int:
        """Where the span that holds `at` ends; `at` itself if none does."""
        index = bisect.bisect_right(self._spans, at, key=lambda span: span[1])
        if index < len(self._spans) and self._spans[index][0] <= at:
            return self._spans[index][1]
        return at

    def missing(self, stop: int) -> list[Span]:
        """The gaps from 0 to `stop`."""
        gaps, at = [], 0
        for start, end in self._spans:
            if start >= stop:
                break
            if start > at:
                gaps.append((at, start))
            at = end
        if at < stop:
            gaps.append((at, stop))
        return gaps

    def copy(self) -> Spans:
        copied = Spans()
        copied._spans = list(self._spans)
        return copied

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._spans == other._spans

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Spans({self._spans})"
