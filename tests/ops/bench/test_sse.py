"""server/ops/bench/sse.py"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.ops.bench.sse import EventReader

STREAM = (
    b": keep-alive\n\n"
    b'data: {"a": 1}\n\n'
    b"event: message\r\nid: 7\r\ndata:no space\r\n\r\n"
    b": ping\n\n"
    b"data: two\ndata: lines\n\n"
    b"\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"no space", b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_came(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    got = [event for start, end in itertools.pairwise(edges) for event in reader.feed(STREAM[start:end])]
    assert got == EVENTS


@pytest.mark.parametrize("unfinished", [b"data: x", b"data: x\n", b": c\n\n"])
def test_an_event_without_its_empty_line_is_not_there_yet(unfinished: bytes) -> None:
    assert EventReader().feed(unfinished) == []
