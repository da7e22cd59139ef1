from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from server.engine.messages import Failed, Job, Started
from server.engine.queue import PATIENCE, Answer, WaitingQueue
from server.engine.run import Run
from tests.support.driving import Log, engine_of, job, run_to_end
from tests.support.scripted import ScriptedBackend


def run_of(job_id: int, owner: str = "", **fields: object) -> Run:
    return Run.of(Job(job_id, [1], owner=owner, **fields), 0.0)  # type: ignore[arg-type]


class Slots:
    """Gives slots away and says what ran in them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.running: list[Run] = []
        self.order: list[int] = []

    def place(self, run: Run) -> Answer:
        if len(self.running) == self.n:
            return Answer.STOP
        if run.job.slot is not None and any(other.job.slot == run.job.slot for other in self.running):
            return Answer.NEXT
        self.running.append(run)
        self.order.append(run.job.id)
        return Answer.TAKEN

    def offer(self, queue: WaitingQueue) -> None:
        queue.offer(Counter(run.job.owner for run in self.running), self.place)

    def drain(self, queue: WaitingQueue) -> list[int]:
        """One after the other leaves, the first to come first."""
        self.offer(queue)
        while self.running:
            del self.running[0]
            self.offer(queue)
        return self.order


def queue_of(*runs: Run) -> WaitingQueue:
    queue = WaitingQueue()
    for run in runs:
        queue.add(run)
    return queue


def test_one_owner_is_served_in_order_of_arrival() -> None:
    assert Slots(2).drain(queue_of(*(run_of(i) for i in range(6)))) == [0, 1, 2, 3, 4, 5]


def test_owners_take_turns_however_many_jobs_they_have() -> None:
    many = [run_of(i, "a") for i in range(6)]
    few = [run_of(10 + i, "b") for i in range(2)]
    assert Slots(1).drain(queue_of(*many, *few)) == [0, 10, 1, 11, 2, 3, 4, 5]


def test_slots_are_shared_and_not_only_turns() -> None:
    """Two long jobs of one owner: the other, whose jobs are short, gets every slot that becomes free until it has as
    many."""
    queue = queue_of(*(run_of(i, "a") for i in range(4)))
    slots = Slots(3)
    slots.offer(queue)
    queue.add(run_of(10, "b"))
    queue.add(run_of(11, "b"))
    del slots.running[0]
    slots.offer(queue)
    assert slots.order == [0, 1, 2, 10]
    slots.running = [run for run in slots.running if run.job.owner == "a"]
    slots.offer(queue)
    assert slots.order == [0, 1, 2, 10, 11]


def test_lower_numbers_go_first_whoever_asks() -> None:
    runs = [run_of(0, "a"), run_of(1, "a", priority=-1), run_of(2, "b", priority=5), run_of(3, "b", priority=-1)]
    assert Slots(1).drain(queue_of(*runs)) == [1, 3, 0, 2]


def test_what_has_no_urgency_is_served_in_the_end() -> None:
    """A stream of urgent jobs without end does not hold up another one for ever."""
    queue = queue_of(run_of(0, "batch", priority=10))
    slots = Slots(1)
    for job_id in range(1, 100):
        queue.add(run_of(job_id, "people"))
        slots.running.clear()
        slots.offer(queue)
        if 0 in slots.order:
            break
    assert 0 in slots.order
    assert len(slots.order) == 2 * PATIENCE + 1


def test_an_owner_at_its_limit_is_passed_by() -> None:
    queue = queue_of(run_of(0, "a", owner_limit=1), run_of(1, "a", owner_limit=1), run_of(2, "b"), run_of(3, "b"))
    slots = Slots(4)
    slots.offer(queue)
    assert slots.order == [0, 2, 3]
    del slots.running[0]
    slots.offer(queue)
    assert slots.order == [0, 2, 3, 1]


def test_choices_of_one_request_start_together() -> None:
    """As far as there are slots; after that it is the turn of others."""
    choices = [run_of(i, "a", same_prompt_as=None if i == 0 else 0) for i in range(5)]
    queue = queue_of(*choices, run_of(10, "b"), run_of(11, "b"))
    slots = Slots(3)
    slots.offer(queue)
    assert slots.order == [0, 1, 2]
    slots.running.clear()
    slots.offer(queue)
    assert slots.order[3:] == [10, 3, 4]


def test_who_was_pushed_out_comes_back_first_and_holds_up_the_others() -> None:
    queue = queue_of(run_of(0, "a", priority=-5))
    for job_id in (8, 9):
        queue.put_back(run_of(job_id, "b", priority=9))
    assert [run.job.id for run in queue] == [9, 8, 0]
    queue.offer({}, lambda run: Answer.STOP)
    assert Slots(1).drain(queue) == [9, 8, 0]


def test_a_run_that_wants_one_slot_does_not_hold_up_those_behind_it() -> None:
    queue = queue_of(run_of(0, slot=0), run_of(1, slot=0), run_of(2), run_of(3))
    slots = Slots(3)
    slots.offer(queue)
    assert slots.order == [0, 2, 3]
    assert [run.job.id for run in queue] == [1]
    queue.put_back(run_of(4, slot=0))
    queue.add(run_of(5))
    del slots.running[1]
    slots.offer(queue)
    assert slots.order == [0, 2, 3, 5]


@pytest.mark.parametrize("where", ["lane", "head"])
def test_a_run_can_be_taken_out(where: str) -> None:
    queue = queue_of(run_of(0), run_of(1))
    if where == "head":
        queue.put_back(run_of(2))
    removed = queue.remove(2 if where == "head" else 1)
    assert removed is not None
    assert queue.remove(removed.job.id) is None
    assert removed.job.id not in Slots(1).drain(queue)
    assert len(queue) == 0
    assert not queue


owners = st.sampled_from(["a", "b", "c", "d"])


@given(
    st.integers(-2, 2),
    st.lists(st.tuples(owners, st.integers(-2, 2)), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
def test_nobody_starves_whatever_the_others_send(
    priority: int, others: list[tuple[str, int]], running: list[int]
) -> None:
    """Lanes that are never empty, owners with ever other numbers of jobs in slots: the wait is bounded in turns."""
    ids = iter(range(1, 10**6))
    victim = run_of(0, "victim", priority=priority)
    queue = queue_of(*(run_of(next(ids), owner, priority=p) for owner, p in others), victim)
    slots = Slots(1)
    # overdue after PATIENCE turns for each lane; then behind the other lanes that are overdue, once each
    bound = (PATIENCE + 1) * (len(others) + 1) + 1
    for turn in range(bound):
        slots.running.clear()
        n_running = {owner: running[(turn + i) % len(running)] for i, (owner, _) in enumerate(others)}
        queue.offer(n_running | {"victim": 9}, slots.place)
        [taken] = slots.running
        if taken is victim:
            return
        queue.add(run_of(next(ids), taken.job.owner, priority=taken.job.priority))
    raise AssertionError(f"still waiting after {bound} turns")


class QueueMachine(RuleBasedStateMachine):
    """No run is lost, none comes twice, limits hold."""

    waiting = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.inside: dict[int, Run] = {}
        self.running: list[Run] = []
        self.ids = iter(range(10**6))
        self.n_returned = 0  # the first so many of the queue were pushed out of a slot
        self.out: Counter[int] = Counter()

    @rule(target=waiting, owner=owners, priority=st.integers(-1, 2), limit=st.sampled_from([0, 0, 1, 2]))
    def add(self, owner: str, priority: int, limit: int) -> int:
        run = run_of(next(self.ids), owner, priority=priority, owner_limit=limit)
        self.queue.add(run)
        self.inside[run.job.id] = run
        return run.job.id

    @rule(owner=owners, n=st.integers(2, 5))
    def add_choices(self, owner: str, n: int) -> None:
        first = next(self.ids)
        for i in range(n):
            run = run_of(first, owner) if i == 0 else run_of(next(self.ids), owner, same_prompt_as=first)
            self.queue.add(run)
            self.inside[run.job.id] = run

    @rule(job_id=consumes(waiting))
    def cancel(self, job_id: int) -> None:
        head = [run.job.id for run in self.queue][: self.n_returned]
        removed = self.queue.remove(job_id)
        assert (removed is not None) == (job_id in self.inside)
        self.n_returned -= job_id in head
        self.inside.pop(job_id, None)

    @rule(n_slots=st.integers(0, 3))
    def offer(self, n_slots: int) -> None:
        free = n_slots

        def place(run: Run) -> Answer:
            nonlocal free
            if free == 0:
                return Answer.STOP
            free -= 1
            self.out[run.job.id] += 1
            self.running.append(run)
            del self.inside[run.job.id]
            if self.n_returned:
                self.n_returned -= 1
            elif run.job.owner_limit:
                assert sum(other.job.owner == run.job.owner for other in self.running) <= run.job.owner_limit
            return Answer.TAKEN

        n_before = len(self.queue)
        self.queue.offer(Counter(run.job.owner for run in self.running), place)
        assert len(self.queue) == n_before - (n_slots - free)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.running:
            self.running.remove(data.draw(st.sampled_from(self.running)))

    @rule()
    def push_out(self) -> None:
        if self.running:
            run = self.running.pop()
            self.queue.put_back(run)
            self.inside[run.job.id] = run
            self.out[run.job.id] -= 1
            self.n_returned += 1

    @invariant()
    def holds_what_went_in_and_has_not_come_out(self) -> None:
        assert sorted(run.job.id for run in self.queue) == sorted(self.inside)
        assert len(self.queue) == len(self.inside)
        assert all(n <= 1 for n in self.out.values())

    def teardown(self) -> None:
        slots = Slots(1)
        expected = set(self.inside)
        assert set(slots.drain(self.queue)) == expected
        assert len(slots.order) == len(expected)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


# ── through the engine ───────────────────────────────────────────────────────────────────────────────────────────────


def waits_in_steps(n_slots: int, jobs: list[Job]) -> dict[int, int]:
    """By job id: steps from submit to start, when all come at once."""
    engine = engine_of(ScriptedBackend(n_slots=n_slots))
    for each in jobs:
        engine.submit(each)
    waits: dict[int, int] = {}
    step = 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Started):
                waits[event.job_id] = step
            assert not isinstance(event, Failed)
        step += 1
    return waits


def test_ten_jobs_of_one_key_do_not_wait_for_forty_of_another() -> None:
    """The measure: twice the wait that the ten would have with half of the slots for themselves."""
    greedy = [job(i, f"greedy job {i}", 20, owner="greedy") for i in range(40)]
    modest = [job(100 + i, f"modest job {i}", 20, owner="modest") for i in range(10)]
    share = statistics.median(waits_in_steps(2, modest).values())
    mixed = waits_in_steps(4, greedy + modest)
    assert len(mixed) == 50
    assert statistics.median(mixed[each.id] for each in modest) < 2 * share
    # in order of arrival they would have waited for nearly all of the forty
    first_come = waits_in_steps(4, [job(each.id, f"job {each.id}", 20) for each in greedy + modest])
    assert statistics.median(first_come[each.id] for each in modest) > 3 * share


def test_a_job_that_was_pushed_out_comes_back_before_those_that_never_ran() -> None:
    engine = engine_of(ScriptedBackend(n_slots=2, n_ctx=100, n_batch=32))
    for job_id in (1, 2):
        engine.submit(job(job_id, str(job_id) * 40, 30, owner="a"))
    log = Log(engine.step() + engine.step())
    engine.submit(job(3, "3" * 20, 5, owner="b", priority=-9))
    holders: list[set[int | None]] = []
    while engine.has_work:
        log.events += engine.step()
        holders.append({view.job_id for view in engine.snapshot().slots})
    assert engine.snapshot().counters.preempted > 0
    pushed_out = next(i for i, held in enumerate(holders) if 2 not in held)
    back = next(i for i, held in enumerate(holders) if i > pushed_out and 2 in held)
    assert all(3 not in held for held in holders[:back])
    assert [log.finished(job_id).timings.predicted_n for job_id in (1, 2, 3)] == [30, 30, 5]


def test_an_owner_s_limit_leaves_slots_to_others() -> None:
    engine = engine_of(ScriptedBackend(n_slots=4))
    for job_id in range(4):
        engine.submit(job(job_id, f"job {job_id}", 10, owner="a", owner_limit=2))
    engine.step()
    assert sum(view.job_id is not None for view in engine.snapshot().slots) == 2
    assert engine.snapshot().n_waiting == 2
    log = run_to_end(engine, Log())
    assert all(log.finished(job_id).timings.predicted_n == 10 for job_id in range(4))
