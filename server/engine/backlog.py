"""What is open at the engine, as the HTTP side knows it: who may queue, and when a place will be free."""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.engine.messages import Failed, Finished, Job, JobEvent, Started, Text, Timings
from server.errors import QueueFull

# With several owners, one may hold at most this many times the places that it leaves free (dynamic thresholds, as
# switches share their buffers): alone it gets 3/4 of the queue, and whoever comes next finds room.
_SHARE = 3
_LONGEST_WAIT_S = 600
_MOST_PROMISES = 4  # for each open job: clients that do not wait shall not push the others' times out for ever
_KEPT_WITHIN_S = 2.0
_LEAST_MEASURED = 8  # tokens of a job that says how long one takes
_UNMEASURED_S = 5  # told while no job has come far enough to measure anything


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs of one owner."""

    waiting: int = 0
    running: int = 0


class Pace:
    """How long jobs take here: moving means over the last ones."""

    _WEIGHT = 0.2  # of the newest job

    def __init__(self) -> None:
        self.token_s: float | None = None  # for each generated token of a job
        self._n_generated: float | None = None
        self._prompt_token_s = 0.0

    def ended(self, timings: Timings) -> None:
        if timings.predicted_n > 0:
            self._n_generated = self._blend(self._n_generated, timings.predicted_n)
            if timings.predicted_n >= _LEAST_MEASURED or self.token_s is None:
                self.token_s = self._blend(self.token_s, _token_s(timings))
        if timings.prompt_n > 0:
            self._prompt_token_s = self._blend(self._prompt_token_s or None, timings.prompt_ms / 1e3 / timings.prompt_n)

    def generating(self, timings: Timings) -> None:
        """Before any job has finished, the running ones are all there is to go by."""
        if self._n_generated is None and timings.predicted_n >= _LEAST_MEASURED:
            self.token_s = _token_s(timings)

    @property
    def usual_s(self) -> float:
        """Seconds of a job of which nothing is known."""
        return (self._n_generated or 0.0) * (self.token_s or 0.0)

    def left_s(self, job: Job, timings: Timings | None) -> float:
        """Seconds that the job will still hold a slot. `timings`: what it has done so far; None: nothing."""
        limit = job.max_tokens if job.max_tokens >= 0 else math.inf
        done = timings.predicted_n if timings is not None else 0
        n_read = timings.cache_n + timings.prompt_n if timings is not None else 0
        n_to_read = 0 if done else max(0, len(job.tokens) - n_read)
        expected = self._n_generated
        if expected is None:  # no job has finished yet: only a limit says how long they are
            expected = 0.0 if math.isinf(limit) else limit
        # A job that is past the usual length goes on for a while; how long, only its limit knows.
        n_left = max(0.0, min(max(expected - done, expected / 4), limit - done))
        return n_to_read * self._prompt_token_s + n_left * (self.token_s or 0.0)

    def _blend(self, old: float | None, new: float) -> float:
        return new if old is None else old + self._WEIGHT * (new - old)


def _token_s(timings: Timings) -> float:
    """The clock of the prediction starts with the first token."""
    return timings.predicted_ms / 1e3 / max(1, timings.predicted_n - 1)


@dataclass(slots=True)
class _Open:
    job: Job
    timings: Timings | None = None  # since it has started


class Backlog:
    """Follows the jobs that are open. `max_waiting`: jobs that may be open beyond the number of slots. `n_owners`:
    owners that may come; with more than one, none can take all places of the queue. `clock`: seconds, monotone."""

    def __init__(self, max_waiting: int, n_owners: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiting = max_waiting
        self._shared = n_owners > 1
        self._now = clock
        self._open: dict[int, _Open] = {}
        self._pace = Pace()
        self._promised: list[float] = []  # when those that were refused were told to come back

    def opened(self, job: Job) -> None:
        self._open[job.id] = _Open(job)

    def note(self, event: JobEvent) -> None:
        """Tell of every event of an open job."""
        entry = self._open.get(event.job_id)
        if entry is None:
            return
        match event:
            case Started(n_cached=n_cached):
                entry.timings = Timings(cache_n=n_cached)
            case Text(timings=timings):
                entry.timings = timings
                self._pace.generating(timings)
            case Finished(timings=timings) | Failed(timings=timings):
                # An answer that was cut, because it was complete or its client left, held a slot for so long as well.
                del self._open[event.job_id]
                self._pace.ended(timings)

    def loads(self) -> Mapping[str, Load]:
        """Owners with jobs; a job waits until its first token is read."""
        waiting = Counter(entry.job.owner for entry in self._open.values() if entry.timings is None)
        running = Counter(entry.job.owner for entry in self._open.values() if entry.timings is not None)
        return {owner: Load(waiting[owner], running[owner]) for owner in sorted({*waiting, *running})}

    def most_of_one(self, n_slots: int) -> int:
        """Jobs that one owner can have open when nobody else has any."""
        n_waiting = 0
        while self._may_wait(n_waiting, n_waiting):
            n_waiting += 1
        return n_slots + n_waiting

    def check_room(self, owner: str, n_jobs: int, n_slots: int) -> None:
        """Raises QueueFull unless `owner` may open so many jobs more."""
        n_unstarted = sum(entry.timings is None and entry.job.owner == owner for entry in self._open.values())
        for i in range(n_jobs):
            n_waiting = len(self._open) + i - n_slots
            if n_waiting < 0:
                continue
            of_owner = min(n_unstarted + i, n_waiting)
            if self._may_wait(n_waiting, of_owner):
                continue
            if n_waiting >= self.max_waiting:
                message = (
                    f"{n_waiting} requests are waiting for {n_slots} slots already, and no more may wait (--max-queue)"
                )
            else:
                message = (
                    f"{of_owner} requests of the API key '{owner}' are waiting already, and the rest of the queue "
                    f"({self.max_waiting - n_waiting} of {self.max_waiting} places, --max-queue) is kept for other keys"
                )
            raise QueueFull(message, retry_after_s=self.promise_s(n_slots))

    def promise_s(self, n_slots: int) -> int:
        """Seconds after which it makes sense to ask again. Those that are told so one after the other are told
        different times: each place that becomes free is promised once."""
        now = self._now()
        # One that is due by now is kept by whoever asks next.
        kept = [due for due in self._promised if due > now + _KEPT_WITHIN_S]
        self._promised = kept[: _MOST_PROMISES * len(self._open)]
        if self._pace.token_s is None:
            return _UNMEASURED_S
        running = [self._pace.left_s(e.job, e.timings) for e in self._open.values() if e.timings is not None]
        waiting = [self._pace.left_s(e.job, None) for e in self._open.values() if e.timings is None]
        # Slots that stay idle while jobs wait are of no use to these: their owners are at their limits.
        n_used = len(running) or n_slots
        whole = [self._pace.left_s(e.job, None) for e in self._open.values()]
        usual_s = self._pace.usual_s or (statistics.mean(whole) if whole else 0.0)
        places = places_free_in(running, waiting, n_used, usual_s)
        wait_s = next(itertools.islice(places, len(self._promised), None))
        whole_s = max(1, min(_LONGEST_WAIT_S, math.ceil(wait_s)))
        self._promised.append(now + whole_s)
        return whole_s

    def _may_wait(self, n_waiting: int, of_owner: int) -> bool:
        """One more job of an owner that has `of_owner` of the `n_waiting` jobs in the queue."""
        n_free = self.max_waiting - n_waiting
        if n_free <= 0:
            return False
        return not self._shared or of_owner == 0 or of_owner < _SHARE * (n_free - 1)


def places_free_in(running: Sequence[float], waiting: Sequence[float], n_slots: int, usual_s: float) -> Iterator[float]:
    """Seconds until the first, second … place in the queue becomes free, without end: whenever a waiting job gets a
    slot. `running`: seconds each job in a slot will still take, `waiting`: seconds each job of the queue will take,
    `usual_s`: seconds of those that will come after them."""
    slots = [*running, *[0.0] * (n_slots - len(running))]
    heapq.heapify(slots)
    for service_s in itertools.chain(waiting, itertools.repeat(usual_s)):
        free_in = slots[0]
        yield free_in
        heapq.heapreplace(slots, free_in + service_s)
