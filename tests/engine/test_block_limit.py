from __future__ import annotations

import pytest

from server.engine.block_limit import BlockCounter
from server.engine.messages import BlockLimit

OPEN, CLOSE, MESSAGE = 1, 2, 3


def answer(n_tokens: int, said: list[int], *, is_open: bool = True, halves: frozenset[int] = frozenset()) -> list[int]:
    """What comes out when the model would say `said`. After the tokens `halves` a character is not whole."""
    counter = BlockCounter(BlockLimit(n_tokens, OPEN, CLOSE, [MESSAGE, CLOSE], is_open=is_open))
    taken: list[int] = []
    left = said[::-1]
    while left:
        forced = counter.forced(within_character=bool(taken) and taken[-1] in halves)
        token = left.pop() if forced is None else forced
        counter.note(token)
        taken.append(token)
    return taken


@pytest.mark.parametrize(
    ("n_tokens", "said", "is_open", "taken"),
    [
        (2, [10, 11, 12], True, [10, 11, MESSAGE, CLOSE, 12]),
        (0, [10], True, [MESSAGE, CLOSE, 10]),
        (2, [10, CLOSE, 11, 12, 13], True, [10, CLOSE, 11, 12, 13]),
        (2, [10, 11, 12], False, [10, 11, 12]),
        (1, [10, OPEN, 11, 12], False, [10, OPEN, 11, MESSAGE, CLOSE, 12]),
        (1, [10, 11, OPEN, 12], True, [10, MESSAGE, CLOSE, 11, OPEN, MESSAGE, CLOSE, 12]),  # one budget for all blocks
    ],
)
def test_a_block_ends_with_its_budget(n_tokens: int, said: list[int], is_open: bool, taken: list[int]) -> None:
    assert answer(n_tokens, said, is_open=is_open) == taken


def test_a_character_is_finished_first() -> None:
    assert answer(1, [10, 11, 12, 13], halves=frozenset({10, 11})) == [10, 11, 12, MESSAGE, CLOSE, 13]
