from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.fit.split import best_split, counts_of, device_of_blocks, smallest_rest

GIB = 1 << 30


def test_eight_equal_gpus_get_ten_blocks_each_of_glm_5_2() -> None:
    """Three dense blocks of half a GiB, 75 with experts, the MTP block that is not loaded, the output."""
    loads = [GIB // 2] * 3 + [int(5.65 * GIB)] * 75 + [0, GIB]
    assert best_split(loads, [79 * GIB] * 8) == (10,) * 8


def test_a_gpu_that_is_partly_taken_gets_fewer_blocks() -> None:
    loads = [GIB] * 40
    split = best_split(loads, [20 * GIB, 8 * GIB, 20 * GIB, 20 * GIB])
    assert split == (13, 1, 13, 13)
    assert smallest_rest(loads, [20 * GIB, 8 * GIB, 20 * GIB, 20 * GIB], split) == 7 * GIB


def test_one_device_gets_everything_and_none_is_an_error() -> None:
    assert best_split([3, 4, 5], [1]) == (3,)
    with pytest.raises(ValueError, match="at least one device"):
        best_split([1], [])


def test_more_devices_than_blocks() -> None:
    split = best_split([5, 5], [10, 10, 10, 10])
    assert sum(split) == 2
    assert max(split) == 1


_LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=9)
_ROOM = st.lists(st.integers(-20, 200), min_size=1, max_size=4)


@given(_LOADS, _ROOM)
def test_no_split_leaves_more(loads: list[int], room: list[int]) -> None:
    split = best_split(loads, room)
    assert sum(split) == len(loads)
    assert min(split) >= 0
    best = max(
        smallest_rest(loads, room, [b - a for a, b in pairwise([0, *cuts, len(loads)])])
        for cuts in ([*c] for c in _cuts(len(loads), len(room) - 1))
    )
    assert best - smallest_rest(loads, room, split) <= max(0, min(room) - best) // 200


def _cuts(n: int, k: int) -> list[tuple[int, ...]]:
    return [tuple(c - i for i, c in enumerate(each)) for each in combinations(range(n + k), k)]


@given(_LOADS, _ROOM, st.data())
def test_more_memory_never_leaves_less(loads: list[int], room: list[int], data: st.DataObject) -> None:
    more = [each + data.draw(st.integers(0, 40)) for each in room]
    before = smallest_rest(loads, room, best_split(loads, room))
    after = smallest_rest(loads, more, best_split(loads, more))
    assert after >= before - max(0, min(more) - after) // 100


@given(st.lists(st.integers(0, 30), min_size=1, max_size=16).filter(any))
def test_whole_numbers_that_add_up_are_honoured(counts: list[int]) -> None:
    devices = device_of_blocks(sum(counts), counts)
    assert counts_of(devices, len(counts)) == tuple(counts)


def test_llama_cpps_own_cut_of_equal_memory_is_not_even() -> None:
    """Seen on eight devices with the same free memory (79.1 GiB): the borders lie on float32's rounding."""
    free = float(int(79.1 * GIB))
    assert counts_of(device_of_blocks(80, [free] * 8), 8) != (10,) * 8


def test_the_first_blocks_stay_on_the_cpu_where_fewer_are_asked_for() -> None:
    assert device_of_blocks(5, [1, 1], 3) == [None, None, 0, 0, 1]
