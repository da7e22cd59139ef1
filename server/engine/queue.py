"""The waiting queue: in which order runs get slots. Fair between owners, and nobody waits for ever.

A free slot goes to the best priority; within it to the owner with the fewest jobs in slots; among equals to the owner
whose turn is longest ago; and of one owner to the job that came first. An owner that was passed over too often is next
whatever the others are. Runs that were pushed out of their slot come before all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from server.engine.run import Run

# A lane is next at the latest when it was passed over so often for each lane that waits.
PATIENCE = 8


class Answer(Enum):
    """What became of a run that was offered a slot."""

    TAKEN = auto()  # it has left the queue
    NEXT = auto()  # it waits for something of its own; those behind it need not
    STOP = auto()  # nothing is free for anybody


@dataclass(slots=True)
class _Lane:
    """The runs of one owner with one priority, by job id, in order of arrival."""

    owner: str
    priority: int
    last_turn: int
    n_passed: int = 0  # turns of others since its own, while it could have had one
    runs: dict[int, Run] = field(default_factory=dict)

    def offers(self) -> Iterator[Run]:
        """The first run that any slot will do for, and those before it that want a slot of their own or wait for their
        state to come from disk."""
        for run in self.runs.values():
            yield run
            if run.job.slot is None and not run.waits_for_disk:
                return


class WaitingQueue:
    """Runs without a slot. The engine adds them, and offers slots as they become free."""

    def __init__(self) -> None:
        self._returning: deque[Run] = deque()
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._n = 0
        self._turn = 0

    def __len__(self) -> int:
        return self._n + len(self._returning)

    def __iter__(self) -> Iterator[Run]:
        yield from self._returning
        for lane in self._lanes.values():
            yield from lane.runs.values()

    def add(self, run: Run) -> None:
        """At the end of its owner's lane. A lane that is new has had its turn just now."""
        key = (run.job.owner, run.job.priority)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(*key, last_turn=self._turn)
        lane.runs[run.job.id] = run
        self._n += 1

    def put_back(self, run: Run) -> None:
        """To the head of all: the run had a slot and lost it to others."""
        self._returning.appendleft(run)

    def remove(self, job_id: int) -> Run | None:
        """Take the run of a job out, wherever it is. None: it does not wait here."""
        for run in self._returning:
            if run.job.id == job_id:
                self._returning.remove(run)
                return run
        for lane in self._lanes.values():
            if job_id in lane.runs:
                return self._leave(lane, job_id)
        return None

    def offer(self, n_running: Mapping[str, int], place: Callable[[Run], Answer]) -> None:
        """Offer runs to `place`, the next in order first, until it says STOP or nobody is left to ask.

        `n_running` are the jobs in slots by owner; an owner at its limit is not asked. The other choices of a request
        come right after the one that is taken, as long as there are slots.
        """
        running = dict(n_running)
        for run in list(self._returning):
            match place(run):
                case Answer.STOP:
                    return
                case Answer.TAKEN:
                    self._returning.remove(run)
                    running[run.job.owner] = running.get(run.job.owner, 0) + 1
                case Answer.NEXT:
                    pass
        request: int | None = None  # whose choices go on
        while True:
            taken = self._offer_once(running, place, request)
            if taken is None:
                return
            running[taken.job.owner] = running.get(taken.job.owner, 0) + 1
            request = _request(taken)

    def _offer_once(
        self, running: Mapping[str, int], place: Callable[[Run], Answer], request: int | None
    ) -> Run | None:
        """The run that was taken. None: none was."""
        lanes = [lane for lane in self._lanes.values() if _may_run(lane, running)]
        overdue = PATIENCE * len(lanes)
        lanes.sort(key=lambda lane: _rank(lane, running, overdue))
        if request is not None:
            lanes.sort(key=lambda lane: _request(next(iter(lane.runs.values()))) != request)  # stable
        for lane in lanes:
            for run in lane.offers():
                match place(run):
                    case Answer.STOP:
                        return None
                    case Answer.NEXT:
                        continue
                    case Answer.TAKEN:
                        self._had_turn(lane, lanes)
                        return self._leave(lane, run.job.id)
        return None

    def _had_turn(self, lane: _Lane, asked: list[_Lane]) -> None:
        self._turn += 1
        for other in asked:
            other.n_passed += 1
        lane.n_passed = 0
        lane.last_turn = self._turn

    def _leave(self, lane: _Lane, job_id: int) -> Run:
        run = lane.runs.pop(job_id)
        self._n -= 1
        if not lane.runs:
            del self._lanes[lane.owner, lane.priority]
        return run


def _may_run(lane: _Lane, running: Mapping[str, int]) -> bool:
    limit = next(iter(lane.runs.values())).job.owner_limit
    return limit == 0 or running.get(lane.owner, 0) < limit


def _rank(lane: _Lane, running: Mapping[str, int], overdue: int) -> tuple[int, int, int, int]:
    """Smallest first."""
    if lane.n_passed >= overdue:
        return -lane.n_passed, 0, 0, lane.last_turn
    return 0, lane.priority, running.get(lane.owner, 0), lane.last_turn


def _request(run: Run) -> int:
    """The id that the choices of one request share."""
    return run.job.same_prompt_as if run.job.same_prompt_as is not None else run.job.id
