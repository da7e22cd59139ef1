"""Sets of byte ranges against sets of numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.store.spans import Spans

SIZE = 40
SPAN = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.tuples(st.booleans(), SPAN), max_size=12), st.integers(0, SIZE + 5))
def test_spans_are_sets_of_bytes(steps: list[tuple[bool, tuple[int, int]]], at: int) -> None:
    spans = Spans()
    there: set[int] = set()
    for adding, (start, stop) in steps:
        if adding:
            new = set(range(start, stop)) - there
            assert spans.add(start, stop) == len(new)
            there |= new
        else:
            spans.remove(start, stop)
            there -= set(range(start, stop))
    assert {byte for start, stop in spans for byte in range(start, stop)} == there
    assert spans.n_bytes == len(there)
    listed = list(spans)
    assert all(stop < following for (_, stop), (following, _) in pairwise(listed))
    assert {byte for start, stop in spans.missing(at) for byte in range(start, stop)} == set(range(at)) - there
    assert spans.frontier(at) == next(byte for byte in range(at, SIZE + 6) if byte not in there)
    assert Spans(listed) == spans == spans.copy()


def test_a_copy_stands_alone() -> None:
    spans = Spans([(0, 4)])
    spans.copy().add(4, 8)
    assert list(spans) == [(0, 4)]
    assert repr(spans) == "Spans([(0, 4)])"


@pytest.mark.parametrize("span", [(3, 2), (-1, 2)])
def test_what_is_no_span_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no span"):
        Spans().add(*span)
