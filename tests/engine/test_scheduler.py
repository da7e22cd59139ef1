from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.engine.scheduler import Reader, Share, StepClock, plan_step

readers_strategy = st.lists(st.integers(1, 5000), max_size=12).map(
    lambda sizes: [Reader(i, n) for i, n in enumerate(sizes)]
)


@given(st.integers(0, 64), readers_strategy, st.integers(1, 4096), st.integers(0, 4096))
def test_plan_fits_the_batch_and_wastes_no_room(
    n_generating: int, readers: list[Reader], n_batch: int, prompt_cap: int
) -> None:
    shares = plan_step(n_generating, readers, n_batch, prompt_cap)
    total = sum(share.n_tokens for share in shares)
    room = max(0, min(n_batch - n_generating, max(prompt_cap, 1)))
    assert n_generating + total <= max(n_batch, n_generating)
    assert total == min(room, sum(reader.n_remaining for reader in readers))
    remaining = {reader.slot: reader.n_remaining for reader in readers}
    assert all(0 < share.n_tokens <= remaining[share.slot] for share in shares)
    assert [share.slot for share in shares] == sorted(share.slot for share in shares)


@given(readers_strategy.filter(bool), st.integers(12, 4096))
def test_every_reader_advances_where_there_is_a_row_for_each(readers: list[Reader], n_batch: int) -> None:
    assert len(plan_step(0, readers, n_batch, n_batch)) == len(readers)


def test_the_soonest_done_gets_the_rest_and_the_long_one_its_guaranteed_part() -> None:
    shares = plan_step(0, [Reader(0, 10_000), Reader(1, 100)], 400, 400)
    assert shares == [Share(0, 300), Share(1, 100)]
    shares = plan_step(0, [Reader(0, 10_000), Reader(1, 5_000)], 400, 400)
    assert shares == [Share(0, 50), Share(1, 350)]


def test_generating_rows_come_first_even_when_they_fill_the_batch() -> None:
    assert plan_step(4, [Reader(9, 100)], 4, 100) == []
    assert plan_step(3, [Reader(9, 100)], 4, 100) == [Share(9, 1)]


def test_chunks_shrink_until_a_step_lasts_the_target() -> None:
    clock = StepClock(max_stall_ms=250, n_batch=2048, n_ubatch=512)
    assert clock.prompt_cap(1) == StepClock.FIRST_CHUNK
    # a machine on which a step costs 40 ms and 8 ms a token
    for _ in range(12):
        n = clock.prompt_cap(1)
        clock.measured(1, n, 40 + 8 * n)
    assert 24 <= clock.prompt_cap(1) <= 28


def test_where_a_tile_of_rows_fits_chunks_are_whole_tiles() -> None:
    clock = StepClock(max_stall_ms=400, n_batch=2048, n_ubatch=512)
    clock.measured(0, 512, 512 * 4)  # 100 tokens within the target
    assert clock.prompt_cap(3) == 125
    clock.measured(3, 125, 125 * 8)  # now 50: one tile costs as much
    assert clock.prompt_cap(3) == 61
    clock.measured(3, 61, 61 * 20)
    assert clock.prompt_cap(3) == 28


def test_the_speed_of_lone_prompts_is_the_first_guess_for_mixed_steps() -> None:
    clock = StepClock(max_stall_ms=250, n_batch=2048, n_ubatch=512)
    clock.measured(0, 512, 5120)
    assert clock.prompt_cap(3) == 25
    assert clock.prefill_tokens_per_s == 100


def test_nobody_generating_means_whole_micro_batches_up_to_the_full_batch() -> None:
    clock = StepClock(max_stall_ms=250, n_batch=2048, n_ubatch=512)
    assert clock.prompt_cap(0) == 512
    clock.measured(0, 512, 100)
    assert clock.prompt_cap(0) == 2048
    clock.measured(0, 512, 40_000)
    assert clock.prompt_cap(0) == 512


def test_a_short_rest_beside_many_rows_does_not_look_like_a_slow_machine() -> None:
    clock = StepClock(max_stall_ms=250, n_batch=2048, n_ubatch=512)
    for _ in range(8):
        n = clock.prompt_cap(4)
        clock.measured(4, n, 40 + 2 * n)
    before = clock.prompt_cap(4)
    clock.measured(4, 3, 46)
    assert clock.prompt_cap(4) == before


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4096), st.floats(0, 1e6)), max_size=30))
def test_the_cap_is_always_usable(steps: list[tuple[int, int, float]]) -> None:
    clock = StepClock(max_stall_ms=250, n_batch=2048, n_ubatch=512)
    for n_generating, n_prompt, step_ms in steps:
        clock.measured(n_generating, n_prompt, step_ms)
        assert 1 <= clock.prompt_cap(0) <= 2048
        assert 1 <= clock.prompt_cap(3) <= 2048


def test_with_less_room_than_readers_they_take_turns() -> None:
    readers = [Reader(i, 100) for i in range(5)]
    n_read = dict.fromkeys(range(5), 0)
    for turn in range(7, 17):
        for share in plan_step(0, readers, 2, 2, turn):
            n_read[share.slot] += share.n_tokens
    assert n_read == dict.fromkeys(range(5), 4)


def test_a_quarter_of_the_target_is_for_prompts_where_decoding_takes_it_all() -> None:
    clock = StepClock(max_stall_ms=400, n_batch=2048, n_ubatch=512)
    clock.measured(0, 512, 512 * 5)
    for _ in range(20):
        n = clock.prompt_cap(4)
        clock.measured(4, n, 800 + 5 * n)
    assert clock.prompt_cap(4) == 20
    # the same where no prompt was ever read alone
    clock = StepClock(max_stall_ms=400, n_batch=2048, n_ubatch=512)
    clock.measured(4, 0, 800)
    for _ in range(20):
        n = clock.prompt_cap(4)
        clock.measured(4, n, 800 + 5 * n)
    assert clock.prompt_cap(4) == 20


def test_a_step_too_short_for_the_clock_costs_nothing() -> None:
    clock = StepClock(max_stall_ms=400, n_batch=2048, n_ubatch=512)
    clock.measured(3, 0, 5e-324)
    for _ in range(4):
        clock.measured(3, 4096, 1e-323)
    assert clock.prompt_cap(3) == 2045
    assert clock.prompt_cap(0) == 512
