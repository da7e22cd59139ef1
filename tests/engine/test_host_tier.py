from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.backend import State
from server.engine.host_tier import HostTier, checksum_of

TOKENS = list(range(1000))


def state(n_bytes: int, seed: int = 0) -> State:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def kept(tier: HostTier) -> list[tuple[int, int]]:
    return sorted((entry.start, entry.end) for entry in tier.entries())


def test_a_path_comes_back_part_by_part() -> None:
    tier = HostTier(1 << 20)
    tier.keep(TOKENS[:100], 0, state(100))
    tier.keep(TOKENS[:300], 100, state(200))
    tier.keep([*TOKENS[:200], 7, 7], 150, state(52))
    parts = tier.way(TOKENS, 0)
    assert [(p.start, p.end, p.entry.start, p.entry.end) for p in parts] == [(0, 100, 0, 100), (100, 300, 100, 300)]
    assert [(p.start, p.end) for p in tier.way(TOKENS, 160)] == [(160, 300)]
    assert tier.covered(TOKENS[:250], 0) == 250
    assert tier.covered([*TOKENS[:200], 7, 7, 7], 0) == 202
    assert tier.covered(TOKENS, 400) == 400


def test_behind_a_gap_nothing_can_be_had() -> None:
    tier = HostTier(1 << 20)
    tier.keep(TOKENS[:300], 100, state(200))
    assert tier.way(TOKENS, 99) == []
    assert tier.covered(TOKENS, 99) == 99
    assert tier.covered(TOKENS, 100) == 300


def test_what_is_inside_a_new_entry_is_not_kept_twice() -> None:
    tier = HostTier(1 << 20)
    tier.keep(TOKENS[:100], 0, state(100))
    tier.keep(TOKENS[:150], 100, state(50))
    tier.keep([9, *TOKENS[:50]], 0, state(51))
    tier.keep(TOKENS[:200], 0, state(200))
    assert kept(tier) == [(0, 51), (0, 200)]
    assert tier.n_bytes == 51 + 200 + 8 * (51 + 200)


def test_states_that_cannot_be_cut_stay_beside_longer_ones() -> None:
    """The checkpoint at the end of a prompt serves the next turn, which differs from what the model thought."""
    tier = HostTier(1 << 20, can_cut=False)
    tier.keep(TOKENS[:100], 0, state(100))
    tier.keep(TOKENS[:200], 0, state(200))
    tier.keep(TOKENS[:200], 0, state(200))
    assert kept(tier) == [(0, 100), (0, 200)]
    whole = tier.whole([*TOKENS[:150], 7])
    assert whole is not None
    assert whole.end == 100


def test_the_least_recently_used_goes_first_and_the_budget_holds() -> None:
    tier = HostTier(3 * (1000 + 8 * 10))
    for i in range(3):
        tier.keep([i] * 10, 0, state(1000))
    tier.touch(tier.way([0] * 10, 0))
    tier.keep([3] * 10, 0, state(1000))
    assert sorted(entry.tokens[0] for entry in tier.entries()) == [0, 2, 3]
    assert (tier.n_evicted, tier.n_bytes) == (1, tier.limit_bytes)


def test_what_a_job_comes_back_for_is_not_evicted() -> None:
    tier = HostTier(2 * (1000 + 80))
    first = tier.keep([0] * 10, 0, state(1000), pinned=True)
    assert first is not None
    tier.keep([1] * 10, 0, state(1000))
    tier.keep([2] * 10, 0, state(1000))
    assert first in tier.entries()
    tier.keep([3] * 10, 0, state(1000), pinned=True)
    assert tier.keep([4] * 10, 0, state(1000)) is None
    first.pinned = False
    assert tier.keep([4] * 10, 0, state(1000)) is not None
    assert first not in tier.entries()


@pytest.mark.parametrize("limit", [0, 1079])
def test_what_does_not_fit_is_not_taken(limit: int) -> None:
    tier = HostTier(limit)
    assert tier.keep([0] * 10, 0, state(1000)) is None
    assert (len(tier), tier.n_bytes) == (0, 0)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_wrong_byte_changes_the_checksum(data: bytes, choose: st.DataObject) -> None:
    good = np.frombuffer(data, dtype=np.uint8)
    bad = good.copy()
    bad[choose.draw(st.integers(0, len(data) - 1))] ^= choose.draw(st.integers(1, 255))
    assert checksum_of(good) != checksum_of(bad)
