from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.engine.prefix import Match, common_length, longest_match

tokens = st.lists(st.integers(0, 2), max_size=300)


@given(tokens, tokens, tokens)
def test_common_length_is_what_a_plain_loop_counts(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_length(left, right) == expected


def test_the_longest_wins_and_the_first_of_equals() -> None:
    assert longest_match([1, 2, 3], [(0, [1]), (1, [1, 2, 9]), (2, [1, 2, 3, 4]), (3, [1, 2, 3])]) == Match(2, 3)


def test_nothing_in_common_is_no_match() -> None:
    assert longest_match([1, 2], [(0, []), (1, [2, 1])]) is None
