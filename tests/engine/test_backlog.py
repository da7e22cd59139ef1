from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.backlog import Backlog, Load, Pace, places_free_in
from server.engine.messages import Failed, FailureKind, Finished, FinishReason, Job, Started, Text, Timings
from server.errors import QueueFull


class Now:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def job(job_id: int, owner: str = "", n_prompt: int = 1, max_tokens: int = -1) -> Job:
    return Job(job_id, [1] * n_prompt, max_tokens=max_tokens, owner=owner)


def started(backlog: Backlog, each: Job) -> None:
    backlog.opened(each)
    backlog.note(Started(each.id, 0, len(each.tokens), 0, 0.0))


def refused(backlog: Backlog, owner: str = "", n_jobs: int = 1, n_slots: int = 1) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        backlog.check_room(owner, n_jobs, n_slots)
    return caught.value


def measured(backlog: Backlog, *, n_generated: int = 10, token_s: float = 1.0, n_read: int = 1) -> None:
    """One job has been here and took so long."""
    backlog.opened(job(0, n_prompt=n_read))
    predicted_ms = (n_generated - 1) * token_s * 1e3
    timings = Timings(prompt_n=n_read, prompt_ms=0.0, predicted_n=n_generated, predicted_ms=predicted_ms)
    backlog.note(Finished(0, FinishReason.END_OF_TURN, timings))


def test_one_owner_may_use_the_whole_queue() -> None:
    backlog = Backlog(3)
    for job_id in range(1, 6):
        backlog.check_room("", 1, 2)
        backlog.opened(job(job_id))
    assert "3 requests are waiting for 2 slots already" in refused(backlog, n_slots=2).message
    assert backlog.most_of_one(2) == 5


def test_the_choices_of_a_request_are_taken_all_or_none() -> None:
    backlog = Backlog(3)
    backlog.check_room("", 4, 1)
    refused(backlog, n_jobs=5)


def test_one_key_leaves_places_for_others() -> None:
    backlog = Backlog(8, n_owners=3)
    n = backlog.most_of_one(n_slots=1)
    assert n == 7  # one in the slot
    for job_id in range(n):
        backlog.check_room("greedy", 1, 1)
        backlog.opened(job(job_id, "greedy"))
    message = refused(backlog, "greedy").message
    assert "6 requests of the API key 'greedy' are waiting already" in message
    assert "2 of 8 places" in message
    for i, owner in enumerate(("b", "c")):
        backlog.check_room(owner, 1, 1)
        backlog.opened(job(100 + i, owner))
    assert "no more may wait" in refused(backlog, "d").message


@pytest.mark.parametrize("max_waiting", [0, 1, 2, 5, 256])
def test_what_one_may_have_is_what_it_can_open(max_waiting: int) -> None:
    backlog = Backlog(max_waiting, n_owners=2)
    most = backlog.most_of_one(2)
    backlog.check_room("a", most, 2)
    refused(backlog, "a", most + 1, 2)
    assert most >= 2 + min(max_waiting, 1)


def test_jobs_are_counted_by_owner_and_leave_with_their_end() -> None:
    backlog = Backlog(8)
    started(backlog, job(1, "a"))
    backlog.opened(job(2, "a"))
    backlog.opened(job(3, "b"))
    assert backlog.loads() == {"a": Load(1, 1), "b": Load(1, 0)}
    backlog.note(Failed(3, FailureKind.CANCELLED, "gone"))
    backlog.note(Finished(1, FinishReason.LENGTH, Timings()))
    backlog.note(Text(1, "late", [], Timings()))
    assert backlog.loads() == {"a": Load(1, 0)}


def test_the_estimate_is_what_the_running_job_has_left() -> None:
    backlog = Backlog(1, clock=Now())
    measured(backlog, n_generated=10, token_s=2.0)
    started(backlog, job(1))
    backlog.opened(job(2))
    assert refused(backlog).retry_after_s == 20
    backlog.note(Text(1, "", [], Timings(prompt_n=1, predicted_n=7, predicted_ms=14_000)))
    backlog._promised.clear()
    assert refused(backlog).retry_after_s == 6


def test_a_limit_on_tokens_is_known_better_than_the_mean() -> None:
    backlog = Backlog(1, clock=Now())
    measured(backlog, n_generated=100, token_s=1.0)
    started(backlog, job(1, max_tokens=30))
    backlog.opened(job(2))
    backlog.note(Text(1, "", [], Timings(predicted_n=26, predicted_ms=26_000)))
    assert refused(backlog).retry_after_s == 4


def test_a_prompt_still_to_be_read_counts() -> None:
    backlog = Backlog(1, clock=Now())
    backlog.opened(job(9))
    timings = Timings(prompt_n=100, prompt_ms=1000, predicted_n=1, predicted_ms=1000)
    backlog.note(Finished(9, FinishReason.END_OF_TURN, timings))
    started(backlog, job(1, n_prompt=400))
    backlog.opened(job(2))
    assert refused(backlog).retry_after_s == 5


def test_before_any_job_has_ended_the_running_ones_are_measured() -> None:
    backlog = Backlog(1, clock=Now())
    assert backlog.promise_s(1) == 5
    started(backlog, job(1, max_tokens=50))
    backlog.opened(job(2))
    backlog.note(Text(1, "", [], Timings(predicted_n=11, predicted_ms=5_000)))
    assert refused(backlog).retry_after_s == 20  # 39 tokens


def test_every_place_is_promised_once_and_again_when_its_time_is_over() -> None:
    now = Now()
    backlog = Backlog(2, clock=now)
    measured(backlog, n_generated=10, token_s=1.0)
    started(backlog, job(1))
    for job_id in (2, 3):
        backlog.opened(job(job_id))
    assert [refused(backlog).retry_after_s for _ in range(4)] == [10, 20, 30, 40]
    now.s += 60
    assert refused(backlog).retry_after_s == 10


def test_idle_slots_are_no_help_to_owners_at_their_limit() -> None:
    backlog = Backlog(1, clock=Now())
    measured(backlog, n_generated=10, token_s=1.0)
    started(backlog, job(1))
    backlog.opened(job(2))
    assert backlog.promise_s(n_slots=4) == 10


def test_clients_that_do_not_wait_push_no_times_out_for_ever() -> None:
    backlog = Backlog(1, clock=Now())
    measured(backlog, n_generated=10, token_s=1.0)
    started(backlog, job(1))
    backlog.opened(job(2))
    assert max(refused(backlog).retry_after_s for _ in range(100)) == 90  # of 8 promises and the one to come


def test_those_that_come_back_together_are_not_in_each_other_s_way() -> None:
    now = Now()
    backlog = Backlog(2, clock=now)
    measured(backlog, n_generated=10, token_s=1.0)
    started(backlog, job(1))
    for job_id in (2, 3):
        backlog.opened(job(job_id))
    told = []
    for _ in range(3):
        told.append(refused(backlog).retry_after_s)
        now.s += 0.01
    assert told == [10, 20, 30]
    now.s += 9.97
    assert refused(backlog).retry_after_s == 30  # the places of 20 and 30 are promised, but that of 10 is not
    assert len(backlog._promised) == 3


def test_before_any_job_has_ended_limits_say_how_long_they_are() -> None:
    backlog = Backlog(1, clock=Now())
    started(backlog, job(1, max_tokens=50))
    backlog.opened(job(2, max_tokens=100))
    backlog.note(Text(1, "", [], Timings(predicted_n=11, predicted_ms=5_000)))
    assert [refused(backlog).retry_after_s for _ in range(4)] == [20, 70, 107, 145]


def test_a_single_token_measures_nothing() -> None:
    backlog = Backlog(1, clock=Now())
    started(backlog, job(1, max_tokens=50))
    backlog.opened(job(2))
    backlog.note(Text(1, "", [], Timings(predicted_n=1, predicted_ms=0.001)))
    assert refused(backlog).retry_after_s == 5


@given(
    st.lists(st.floats(0, 1000), max_size=8),
    st.lists(st.floats(0, 1000), max_size=20),
    st.integers(1, 8),
    st.floats(0, 1000),
)
def test_places_become_free_in_order(running: list[float], waiting: list[float], n_slots: int, usual_s: float) -> None:
    n = len(waiting) + max(n_slots, len(running))
    times = list(itertools.islice(places_free_in(running, waiting, n_slots, usual_s), n + 5))
    assert times == sorted(times)
    assert times[0] == min([*running, *[0.0] * (n_slots - len(running))])
    if n_slots == 1 and len(running) == 1:  # one after the other
        assert times == pytest.approx(list(itertools.accumulate([*running, *waiting, *[usual_s] * 5])))


@given(st.builds(Timings, prompt_n=st.integers(0, 99), prompt_ms=st.floats(0, 1e6), predicted_n=st.integers(0, 99)))
def test_what_is_left_is_never_negative(timings: Timings) -> None:
    pace = Pace()
    pace.ended(Timings(prompt_n=5, prompt_ms=50, predicted_n=20, predicted_ms=1000))
    for max_tokens in (-1, 0, 10, 1000):
        assert 0 <= pace.left_s(job(1, n_prompt=50, max_tokens=max_tokens), timings) < 1e6
