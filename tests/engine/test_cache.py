"""The cache as a resource: what finished jobs leave behind, where it goes, and how it comes back."""

from __future__ import annotations

import pytest

from server.engine.backend import Piece
from server.engine.engine import Engine
from server.engine.messages import Job, SamplingOptions
from tests.support.driving import Log, check_books, engine_of, job, run_to_end, text_alone
from tests.support.scripted import ScriptedBackend, tokens_of

SYSTEM = "You are a helpful assistant. " * 8  # 232 tokens


def ask(engine: Engine, log: Log, job_id: int, prompt: str, max_tokens: int = 4, **fields: object) -> int:
    """Run one job to its end; the number of its prompt tokens that were not read again."""
    engine.submit(job(job_id, prompt, max_tokens, **fields))
    run_to_end(engine, log)
    return log.finished(job_id).timings.cache_n


def test_more_chats_than_slots_are_kept_and_go_on_where_they_were() -> None:
    backend = ScriptedBackend(n_slots=2, n_sequences=8)
    engine, log = engine_of(backend), Log()
    chats = [f"{letter * 50} how are you?" for letter in "abcde"]
    for i, chat in enumerate(chats):
        assert ask(engine, log, i, chat) == 0
    for i, chat in enumerate(chats):
        turn = chat + log.text(i) + " And now?"
        assert ask(engine, log, 10 + i, turn) == len(chat) + 3  # the last token of an answer is never decoded
    check_books(engine, backend)


def test_a_prefix_is_shared_from_a_finished_chat_and_leaves_it_whole() -> None:
    backend = ScriptedBackend(n_slots=2, n_sequences=8)
    engine, log = engine_of(backend, cache_idle_slots=False), Log()
    first = SYSTEM + "a" * 100
    ask(engine, log, 1, first)
    assert ask(engine, log, 2, SYSTEM + "b" * 100) == len(SYSTEM)
    assert engine.snapshot().cells_shared == len(SYSTEM)
    assert ask(engine, log, 3, first + log.text(1) + "c") == len(first) + 3
    check_books(engine, backend)


def test_cells_of_finished_chats_go_to_host_memory_while_others_run_and_come_back() -> None:
    backend = ScriptedBackend(n_slots=2, n_sequences=8)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    chats = [letter * 400 for letter in "abc"]
    for i, chat in enumerate(chats):
        ask(engine, log, i, chat)
    assert engine.snapshot().n_retained >= 1  # the last one: nobody ran after it
    engine.submit(job(9, "z" * 30, 8))
    for _ in range(6):
        log.events += engine.step()
    assert engine.snapshot().cells_retained == 0
    run_to_end(engine, log)
    for i, chat in enumerate(chats):
        assert ask(engine, log, 20 + i, chat + log.text(i) + "!") == len(chat) + 3
    counters = engine.snapshot().counters
    assert counters.cached_tokens_host >= 2 * 400
    assert counters.states_saved >= 3
    check_books(engine, backend)


def test_nothing_is_moved_without_host_memory_or_when_told_not_to() -> None:
    for options in ({"cache_ram_bytes": 0}, {"cache_idle_slots": False}):
        backend = ScriptedBackend(n_slots=2, n_sequences=8)
        engine, log = engine_of(backend, **options), Log()
        for i in range(4):
            ask(engine, log, i, "abcd"[i] * 400)
        assert engine.snapshot().n_retained == 4
        assert backend.n_saved == 0


def test_a_common_prefix_is_kept_once_in_host_memory() -> None:
    backend = ScriptedBackend(n_slots=2, n_sequences=8)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    for i in range(6):
        ask(engine, log, i, SYSTEM + "abcdef"[i] * 80)
    while engine.cache.drop_one():
        pass
    spans = sorted((entry.start, entry.end) for entry in engine.cache.host.entries())
    assert sum(1 for start, _ in spans if start == 0) == 1
    assert sum(end - start for start, end in spans) == len(SYSTEM) + 6 * 83
    for i in range(6):
        assert ask(engine, log, 10 + i, SYSTEM + "abcdef"[i] * 80 + log.text(i) + "!") == len(SYSTEM) + 83
    check_books(engine, backend)


def test_a_job_that_was_swapped_out_is_not_read_again() -> None:
    backend = ScriptedBackend(n_slots=2, n_ctx=160, n_sequences=4)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    engine.submit(job(1, "a" * 50, 60))
    engine.submit(job(2, "b" * 50, 60))
    run_to_end(engine, log)
    counters = engine.snapshot().counters
    assert (counters.preempted, counters.swapped) == (1, 1)
    read = [piece for batch in backend.batches for piece in batch]
    assert sum(len(piece.tokens) for piece in read) == 2 * (50 + 59)  # every token once
    for job_id, letter in ((1, "a"), (2, "b")):
        assert log.text(job_id) == text_alone(letter * 50, 60, n_ctx=160)
    assert not any(entry.pinned for entry in engine.cache.host.entries())
    check_books(engine, backend)


def test_a_swapped_out_job_whose_client_leaves_gives_its_memory_up() -> None:
    backend = ScriptedBackend(n_slots=2, n_ctx=160, n_sequences=4)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    engine.submit(job(1, "a" * 50, 60))
    engine.submit(job(2, "b" * 50, 60))
    while not engine.snapshot().counters.preempted:
        log.events += engine.step()
    assert any(entry.pinned for entry in engine.cache.host.entries())
    engine.cancel(2)
    run_to_end(engine, log)
    assert not any(entry.pinned for entry in engine.cache.host.entries())


def test_without_room_for_its_state_a_swapped_out_job_is_read_again() -> None:
    backend = ScriptedBackend(n_slots=2, n_ctx=160, n_sequences=4)
    engine, log = engine_of(backend, cache_ram_bytes=100), Log()
    engine.submit(job(1, "a" * 50, 60))
    engine.submit(job(2, "b" * 50, 60))
    run_to_end(engine, log)
    assert engine.snapshot().counters.swapped == 0
    assert log.text(2) == text_alone("b" * 50, 60, n_ctx=160)


@pytest.mark.parametrize("unified", [True, False])
def test_a_state_that_cannot_be_cut_has_a_checkpoint_where_the_answer_begins(unified: bool) -> None:
    """A template that leaves the reasoning out of old turns parts from the sequence right there."""
    backend = ScriptedBackend(n_slots=2, partial_removal=False, unified=unified)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    turn = f"<|user|>{'hello ' * 20}"
    assert ask(engine, log, 1, turn + "<|assistant|>", 30) == 0
    answered = turn + "<|assistant|>short answer<|user|>and more"
    assert ask(engine, log, 2, answered + "<|assistant|>", 5) == len(tokens_of(turn))
    assert log.text(2) == text_alone(answered + "<|assistant|>", 5, partial_removal=False, unified=unified)
    assert engine.snapshot().counters.cached_tokens_host == len(tokens_of(turn))
    check_books(engine, backend)


def test_what_a_state_that_cannot_be_cut_costs_is_counted() -> None:
    backend = ScriptedBackend(n_slots=1, partial_removal=False)
    engine, log = engine_of(backend, cache_ram_bytes=0), Log()
    ask(engine, log, 1, "a" * 90)
    assert ask(engine, log, 2, "a" * 80 + "b") == 0
    assert engine.snapshot().counters.rereads_uncuttable == 1


def test_a_damaged_state_is_refused_and_the_answer_is_right_all_the_same() -> None:
    backend = ScriptedBackend(n_slots=1, n_sequences=4)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    prompt = "a" * 100
    ask(engine, log, 1, prompt)
    while engine.cache.drop_one():
        pass
    (entry,) = engine.cache.host.entries()
    entry.data[len(entry.data) // 2] ^= 1
    assert ask(engine, log, 2, prompt) == 0
    assert log.text(2) == log.text(1)
    assert engine.snapshot().counters.states_refused == 1
    assert entry not in engine.cache.host.entries()


def test_a_state_that_llama_cpp_does_not_take_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(n_slots=1, n_sequences=4)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    ask(engine, log, 1, "a" * 100)
    while engine.cache.drop_one():
        pass
    monkeypatch.setattr(backend, "restore", lambda *arguments: False)
    assert ask(engine, log, 2, "a" * 100) == 0
    assert log.text(2) == log.text(1)
    assert len(engine.cache.host) == 0
    check_books(engine, backend)


def test_reading_wins_where_restoring_was_slower() -> None:
    backend = ScriptedBackend(n_slots=1, n_sequences=4, n_batch=512, n_ubatch=512)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    slow, restore = [True], backend.restore

    def restoring(sequence: int, state: object, start: int, end: int) -> bool:
        if slow:
            engine._now.now += 60.0  # type: ignore[attr-defined]
        return restore(sequence, state, start, end)  # type: ignore[arg-type]

    backend.restore = restoring  # type: ignore[method-assign]
    for i, expected in enumerate([0, 99, 0]):  # the first restore is tried, and is too slow for a second
        assert ask(engine, log, i, "a" * 100) == expected
        while engine.cache.drop_one():
            pass


def test_the_leader_of_seven_followers_leaves_in_mid_prefill() -> None:
    backend = ScriptedBackend(n_slots=8, n_sequences=32, n_batch=16, n_ctx=2048)
    engine, log = engine_of(backend), Log()
    prompts = [SYSTEM + str(i) * 5 for i in range(8)]
    for i, prompt in enumerate(prompts):
        engine.submit(job(i, prompt, 5))
    for _ in range(5):
        log.events += engine.step()
    assert engine.snapshot().counters.follower_waits == 7
    engine.cancel(0)
    run_to_end(engine, log)
    for i, prompt in enumerate(prompts[1:], 1):
        assert log.text(i) == text_alone(prompt, 5)
    n_read = sum(len(piece.tokens) for batch in backend.batches for piece in batch)
    assert n_read < len(SYSTEM) + 8 * (5 + 5) + 16  # the shared part once
    check_books(engine, backend)


def test_a_leader_that_is_swapped_out_leaves_its_followers_to_go_on() -> None:
    """Job 1 fills the cache while 2 reads; 3 waits for what 2 reads."""
    backend = ScriptedBackend(n_slots=3, n_sequences=8, n_batch=16, n_ctx=200)
    engine, log = engine_of(backend, cache_ram_bytes=1 << 20), Log()
    prompts = {1: "a" * 60, 2: "b" * 90 + "x", 3: "b" * 90 + "y"}
    for job_id, prompt in prompts.items():
        engine.submit(job(job_id, prompt, 70 if job_id == 1 else 20))
    run_to_end(engine, log)
    for job_id, prompt in prompts.items():
        assert log.text(job_id) == text_alone(prompt, 70 if job_id == 1 else 20, n_ctx=200)
    check_books(engine, backend)


def test_the_host_budget_is_never_exceeded() -> None:
    backend = ScriptedBackend(n_slots=2, n_sequences=6)
    engine, log = engine_of(backend, cache_ram_bytes=8000), Log()
    for i in range(60):
        ask(engine, log, i, f"{i:03d}" * (5 + i % 30))
        snapshot = engine.snapshot()
        assert snapshot.host_cache_bytes <= 8000
        check_books(engine, backend)
    assert engine.cache.host.n_evicted > 0


def test_separate_streams_are_copied_when_a_good_part_is_shared() -> None:
    backend = ScriptedBackend(n_slots=2, unified=False, n_ctx=2048)
    engine, log = engine_of(backend), Log()
    engine.submit(job(1, SYSTEM + "a" * 80, 40))
    while not any(piece.start >= 300 for batch in backend.batches for piece in batch):
        log.events += engine.step()
    assert ask(engine, log, 2, SYSTEM + "b" * 80) == len(SYSTEM)
    assert log.text(2) == text_alone(SYSTEM + "b" * 80, 4)
    check_books(engine, backend)


def test_choices_of_a_prompt_leave_no_cells_behind() -> None:
    backend = ScriptedBackend(n_slots=4, n_sequences=32)
    engine, log = engine_of(backend, cache_idle_slots=False), Log()
    for job_id in range(4):
        tokens = tokens_of(SYSTEM)
        same = None if job_id == 0 else 0
        engine.submit(Job(job_id, tokens, SamplingOptions(temperature=0.0), 6, same_prompt_as=same))
    run_to_end(engine, log)
    assert engine.snapshot().cells_used == len(SYSTEM) - 1 + 4 * 6  # the last prompt token is each one's own
    check_books(engine, backend)


def test_a_batch_never_holds_a_sequence_twice() -> None:
    seen: list[list[int]] = []

    def on_decode(pieces: list[Piece]) -> None:
        seen.append([piece.sequence for piece in pieces])

    backend = ScriptedBackend(n_slots=4, n_sequences=6, on_decode=on_decode)
    engine, log = engine_of(backend), Log()
    for i in range(12):
        engine.submit(job(i, SYSTEM[: 20 * i] + "q", 5))
    run_to_end(engine, log)
    assert all(len(set(sequences)) == len(sequences) for sequences in seen)


def test_a_finished_chat_that_lost_cells_is_dropped_and_no_other_with_it() -> None:
    backend = ScriptedBackend(n_slots=2, n_sequences=8)
    engine, log = engine_of(backend, cache_idle_slots=False), Log()
    for job_id, letter in enumerate("ab"):
        ask(engine, log, job_id, letter * 60)
    lost, whole = engine.cache.sequences()
    backend.cells[lost.id] = backend.cells[lost.id][:5]
    assert engine.cache.drop_one()
    assert (lost.is_gone, engine.cache.sequences()) == (True, [whole])
    assert engine.snapshot().counters.cache_mismatches == 1
    assert ask(engine, log, 2, "b" * 60) == 59
    check_books(engine, backend)
