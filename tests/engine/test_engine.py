from __future__ import annotations

import msgspec
import pytest

from server.engine.backend import DecodeStatus, Piece
from server.engine.messages import Failed, FailureKind, FinishReason, Progress, SlotState, Started, Text
from server.errors import EngineFailure, InvalidRequest
from tests.support.driving import Log, engine_of, job, run_to_end, text_alone
from tests.support.scripted import END, ScriptedBackend, ScriptedSampler


def test_one_job_from_prompt_to_end() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda prompt: f"You said {prompt}."))
    engine.submit(job(1, "hi"))
    first = engine.step()
    assert [type(event) for event in first] == [Started], "told before the batch that may take long"
    log = run_to_end(engine, Log(first))
    assert log.text(1) == "You said hi."
    end = log.finished(1)
    assert end.reason is FinishReason.END_OF_TURN
    assert (end.timings.cache_n, end.timings.prompt_n, end.timings.predicted_n) == (0, 2, 13)
    assert end.timings.prompt_ms > 0
    assert end.timings.predicted_ms > 0


def test_end_token_is_counted_but_not_shown() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: ""))
    engine.submit(job(1, "hi", show_special=True))
    log = run_to_end(engine, Log())
    assert log.text(1) == ""
    assert log.finished(1).timings.predicted_n == 1


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    backend = ScriptedBackend(reply=lambda _: "")
    engine = engine_of(backend)
    plain = job(1, "hi", 5)
    engine.submit(msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, ignore_eos=True)))
    end = run_to_end(engine, Log()).finished(1)
    assert (end.reason, end.timings.predicted_n) == (FinishReason.LENGTH, 5)


@pytest.mark.parametrize(("max_tokens", "text"), [(0, ""), (1, "a"), (3, "abc")])
def test_max_tokens(max_tokens: int, text: str) -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "abcdef"))
    engine.submit(job(1, "hi", max_tokens))
    log = run_to_end(engine, Log())
    assert log.text(1) == text
    end = log.finished(1)
    assert (end.reason, end.truncated, end.timings.predicted_n) == (FinishReason.LENGTH, False, max_tokens)


def test_stop_string_is_cut_and_named() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "one two three"))
    engine.submit(job(1, "hi", stop=("two", "xyz")))
    log = run_to_end(engine, Log())
    assert log.text(1) == "one "
    end = log.finished(1)
    assert (end.reason, end.stop_text) == (FinishReason.STOP_TEXT, "two")


def test_characters_arrive_whole() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "漢字🙂"))
    engine.submit(job(1, "hi"))
    log = run_to_end(engine, Log())
    assert [event.text for event in log.of(1) if isinstance(event, Text)] == ["漢", "字", "🙂"]


def test_context_full_ends_with_length_and_says_truncated() -> None:
    engine = engine_of(ScriptedBackend(n_ctx=64, n_slots=1))
    engine.submit(job(1, "x" * 60))
    end = run_to_end(engine, Log()).finished(1)
    assert (end.reason, end.truncated) == (FinishReason.LENGTH, True)
    assert end.timings.prompt_n + end.timings.predicted_n == 65  # the last token was sampled, not stored


def test_a_prompt_that_cannot_fit_fails_at_once() -> None:
    engine = engine_of(ScriptedBackend(n_ctx=64, n_slots=1))
    engine.submit(job(1, "x" * 64))
    end = run_to_end(engine, Log()).end(1)
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.INVALID


def test_a_bad_grammar_fails_its_job_only() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "fine"))
    bad = job(1, "hi")
    engine.submit(msgspec.structs.replace(bad, sampling=msgspec.structs.replace(bad.sampling, grammar="bad")))
    engine.submit(job(2, "hi"))
    log = run_to_end(engine, Log())
    end = log.end(1)
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.INVALID
    assert "grammar" in end.message
    assert log.text(2) == "fine"


def test_a_bad_grammar_is_told_while_its_job_would_still_wait() -> None:
    engine = engine_of(ScriptedBackend(n_slots=1))
    engine.submit(job(1, "busy for long", 50))
    log = Log(engine.step() + engine.step())
    bad = job(2, "hi")
    engine.submit(msgspec.structs.replace(bad, sampling=msgspec.structs.replace(bad.sampling, grammar="bad")))
    log.events += engine.step()
    assert isinstance(log.end(2), Failed)
    assert engine.snapshot().n_waiting == 0


def test_time_limit() -> None:
    engine = engine_of(ScriptedBackend())
    engine.submit(job(1, "hi", time_limit_ms=50.0))
    end = run_to_end(engine, Log()).finished(1)
    assert end.reason is FinishReason.LENGTH
    assert end.timings.predicted_ms == pytest.approx(50, abs=10)


def test_progress_starts_at_what_was_cached_and_ends_at_the_prompt() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "ok"))
    engine.submit(job(1, "x" * 40))
    log = run_to_end(engine, Log())
    engine.submit(job(2, "x" * 40 + "y" * 60, report_progress=True))
    log = run_to_end(engine, Log())
    progress = [event for event in log.of(2) if isinstance(event, Progress)]
    processed = [event.n_processed for event in progress]
    assert processed == sorted(processed)
    assert (processed[0], processed[-1]) == (40, 100)
    assert next(event.time_ms for event in progress) == 0.0
    assert {event.n_cached for event in progress} == {40}


def test_the_same_prompt_again_reads_one_token() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "ok"))
    engine.submit(job(1, "a long prompt"))
    run_to_end(engine, Log())
    engine.submit(job(2, "a long prompt"))
    timings = run_to_end(engine, Log()).finished(2).timings
    assert (timings.cache_n, timings.prompt_n) == (12, 1)


def test_cache_prompt_off_reads_everything() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "ok"))
    for job_id in (1, 2):
        engine.submit(job(job_id, "a long prompt", cache_prompt=False))
        assert run_to_end(engine, Log()).finished(job_id).timings.cache_n == 0


def test_memory_that_cannot_roll_back_is_read_again() -> None:
    options = {"partial_removal": False, "unified": False}
    engine = engine_of(ScriptedBackend(**options))  # type: ignore[arg-type]
    engine.submit(job(1, "shared prefix, one end", 5))
    run_to_end(engine, Log())
    engine.submit(job(2, "shared prefix, other end", 5))
    log = run_to_end(engine, Log())
    assert log.finished(2).timings.cache_n == 0
    assert log.text(2) == text_alone("shared prefix, other end", 5)


def test_a_memory_that_lost_cells_is_not_trusted() -> None:
    backend = ScriptedBackend()
    engine = engine_of(backend)
    engine.submit(job(1, "a long prompt", 3))
    run_to_end(engine, Log())
    backend.cells.clear()
    engine.submit(job(2, "a long prompt", 3))
    log = run_to_end(engine, Log())
    assert log.finished(2).timings.cache_n == 0
    assert log.text(2) == text_alone("a long prompt", 3)


@pytest.mark.parametrize("unified", [True, False])
def test_choices_share_one_prefill(unified: bool) -> None:
    backend = ScriptedBackend(unified=unified)
    engine = engine_of(backend)
    prompt = "p" * 200
    engine.submit(job(1, prompt, 4))
    for other in (2, 3):
        engine.submit(job(other, prompt, 4, same_prompt_as=1))
    log = run_to_end(engine, Log())
    assert [log.finished(i).timings.prompt_n for i in (1, 2, 3)] == [200, 1, 1]
    assert {log.text(i) for i in (1, 2, 3)} == {text_alone(prompt, 4)}


def test_followers_take_over_when_the_leader_leaves_in_mid_prefill() -> None:
    engine = engine_of(ScriptedBackend(n_slots=8))
    prompt = "p" * 300
    for i in range(1, 9):
        engine.submit(job(i, prompt + str(i), 4))
    log = Log()
    for _ in range(3):
        log.events += engine.step()
    assert [slot.state for slot in engine.snapshot().slots].count(SlotState.WAITING) == 7
    engine.cancel(1)
    run_to_end(engine, log)
    assert [log.text(i) for i in range(2, 9)] == [text_alone(f"{prompt}{i}", 4) for i in range(2, 9)]
    read = sum(log.finished(i).timings.prompt_n for i in range(2, 9))
    assert read < 2 * 300, "the shared part was read again and again"


def test_generating_rows_are_in_every_batch_while_a_long_prompt_is_read() -> None:
    backend = ScriptedBackend(n_ctx=4096)
    engine = engine_of(backend)
    engine.submit(job(1, "short", 60))
    log = Log()
    log.events += engine.step()
    engine.submit(job(2, "x" * 1000, 2))
    run_to_end(engine, log)
    generating = [piece for batch in backend.batches for piece in batch if piece.sequence == 0]
    assert len(generating) >= 60
    first = next(i for i, batch in enumerate(backend.batches) if len(batch) == 2)
    assert all(batch[0].sequence == 0 for batch in backend.batches[first : first + 50])


def test_without_continuous_batching_prompts_wait_for_the_generating() -> None:
    backend = ScriptedBackend()
    engine = engine_of(backend, cont_batching=False)
    engine.submit(job(1, "short", 10))
    log = Log(engine.step() + engine.step())
    engine.submit(job(2, "x" * 100, 2))
    run_to_end(engine, log)
    assert all(len(batch) == 1 for batch in backend.batches)


def test_a_job_for_a_busy_slot_waits_and_others_pass_it() -> None:
    engine = engine_of(ScriptedBackend(n_slots=2))
    engine.submit(job(1, "first", 30, slot=0))
    engine.submit(job(2, "same slot", 3, slot=0))
    engine.submit(job(3, "other", 3))
    log = run_to_end(engine, Log())
    ends = [event.job_id for event in log.events if not isinstance(event, Text | Started)]
    assert ends == [3, 1, 2]
    started = {event.job_id: event.slot for event in log.events if isinstance(event, Started)}
    assert started == {1: 0, 2: 0, 3: 1}


def test_cancel_in_queue_prefill_and_generation_frees_the_slot_at_once() -> None:
    backend = ScriptedBackend(n_slots=1)
    engine = engine_of(backend)
    engine.submit(job(1, "x" * 500))
    engine.submit(job(2, "queued"))
    log = Log(engine.step())
    engine.cancel(2)
    engine.cancel(1)
    assert engine.snapshot().slots[0].state is SlotState.IDLE
    assert engine.snapshot().n_waiting == 0
    engine.submit(job(3, "now", 50))
    for _ in range(5):
        log.events += engine.step()
    assert engine.snapshot().slots[0].state is SlotState.GENERATING
    engine.cancel(3)
    engine.cancel(3)
    engine.cancel(99)
    run_to_end(engine, log)
    kinds = {i: end.kind for i in (1, 2, 3) if isinstance(end := log.end(i), Failed)}
    assert kinds == dict.fromkeys((1, 2, 3), FailureKind.CANCELLED)
    assert backend.n_open_samplers == 0
    assert engine.snapshot().counters.jobs_cancelled == 3


def test_what_a_cancelled_job_has_read_serves_the_retry() -> None:
    backend = ScriptedBackend(n_slots=1)
    engine = engine_of(backend)
    engine.submit(job(1, "x" * 500))
    log = Log()
    for _ in range(4):
        log.events += engine.step()
    n_read = sum(len(piece.tokens) for batch in backend.batches for piece in batch)
    engine.cancel(1)
    engine.submit(job(2, "x" * 500, 1))
    run_to_end(engine, log)
    assert log.finished(2).timings.cache_n == n_read > 0


def test_three_jobs_that_need_half_as_much_again_as_the_cache_all_finish() -> None:
    backend = ScriptedBackend(n_ctx=400, n_slots=3)
    engine = engine_of(backend)
    prompts = [letter * 100 for letter in "abc"]
    for i, prompt in enumerate(prompts):
        engine.submit(job(i, prompt, 100))
    log = run_to_end(engine, Log())
    assert engine.snapshot().counters.preempted > 0
    for i, prompt in enumerate(prompts):
        assert log.finished(i).reason is FinishReason.LENGTH
        assert not log.finished(i).truncated
        assert log.text(i) == text_alone(prompt, 100)


def test_idle_sequences_give_way_first() -> None:
    engine = engine_of(ScriptedBackend(n_ctx=400, n_slots=4))
    for i in range(3):
        engine.submit(job(i, str(i) * 100, 10))
        run_to_end(engine, Log())
    engine.submit(job(9, "z" * 300, 10))
    log = run_to_end(engine, Log())
    counters = engine.snapshot().counters
    assert log.finished(9).truncated is False
    assert counters.evicted >= 2
    assert counters.preempted == 0


def test_a_failed_batch_ends_its_jobs_and_the_next_one_is_served() -> None:
    fail = [True]

    def on_decode(pieces: list[Piece]) -> DecodeStatus | None:
        return DecodeStatus.FAILED if fail.pop() else None

    backend = ScriptedBackend(reply=lambda _: "ok", on_decode=on_decode)
    engine = engine_of(backend)
    engine.submit(job(1, "hi"))
    log = run_to_end(engine, Log())
    end = log.end(1)
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.ENGINE
    backend.on_decode = None
    engine.submit(job(2, "hi"))
    assert run_to_end(engine, log).text(2) == "ok"


def test_failures_without_end_are_not_hidden() -> None:
    engine = engine_of(ScriptedBackend(on_decode=lambda _: DecodeStatus.FAILED))
    for i in range(2):
        engine.submit(job(i, "hi"))
        run_to_end(engine, Log())
    engine.submit(job(2, "hi"))
    with pytest.raises(EngineFailure, match="3 batches in a row"):
        run_to_end(engine, Log())


def test_counters_add_up() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "four"))
    for i in range(6):
        engine.submit(job(i, f"{i} prompt"))
    log = run_to_end(engine, Log())
    counters = engine.snapshot().counters
    assert counters.jobs_submitted == counters.jobs_finished == 6
    assert counters.predicted_tokens == 6 * 5
    assert counters.prompt_tokens + counters.prompt_cached_tokens == 6 * 8
    assert counters.predicted_ms == pytest.approx(sum(log.finished(i).timings.predicted_ms for i in range(6)))
    assert END not in [token for event in log.events if isinstance(event, Text) for token in event.tokens]


def test_logprobs_come_one_for_each_token_of_the_answer() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "漢ok"))
    engine.submit(job(1, "hi", n_logprobs=2))
    log = run_to_end(engine, Log())
    texts = [event for event in log.of(1) if isinstance(event, Text)]
    assert all(len(event.tokens) == len(event.logprobs) for event in texts)
    assert sum(len(event.tokens) for event in texts) == len("漢ok".encode())
    assert all(len(entry.top) == 2 for event in texts for entry in event.logprobs)


def test_a_grammar_that_leaves_no_token_fails_its_job_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(reply=lambda _: "fine")
    engine = engine_of(backend)
    engine.submit(job(1, "one"))
    engine.submit(job(2, "two"))
    sample = ScriptedSampler.sample

    def sample_or_dead_end(self: ScriptedSampler, row: int) -> int:
        if self.job.id == 1 and self.n_sampled == 2:
            raise InvalidRequest("the grammar leaves no token to go on with", param="grammar")
        return sample(self, row)

    monkeypatch.setattr(ScriptedSampler, "sample", sample_or_dead_end)
    log = run_to_end(engine, Log())
    end = log.end(1)
    assert isinstance(end, Failed)
    assert (end.kind, end.message) == (FailureKind.INVALID, "the grammar leaves no token to go on with")
    assert log.text(1) == "fi"
    assert log.text(2) == "fine"
    assert backend.n_open_samplers == 0
