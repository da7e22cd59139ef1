"""Drive an Engine step by step and collect what it says per job."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.engine import Engine
from server.engine.messages import Failed, Finished, Job, JobEvent, SamplingOptions, SlotState, Text
from server.engine.options import SchedulerOptions
from tests.support.scripted import ScriptedBackend, tokens_of


class Clock:
    """Seconds that advance by a millisecond whenever they are read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Log:
    events: list[JobEvent] = field(default_factory=list)

    def of(self, job_id: int) -> list[JobEvent]:
        return [event for event in self.events if event.job_id == job_id]

    def text(self, job_id: int) -> str:
        return "".join(event.text for event in self.of(job_id) if isinstance(event, Text))

    def end(self, job_id: int) -> Finished | Failed:
        ends = [event for event in self.of(job_id) if isinstance(event, Finished | Failed)]
        assert len(ends) == 1, f"job {job_id} ended {len(ends)} times"
        assert self.of(job_id)[-1] is ends[0], "something came after the end"
        return ends[0]

    def finished(self, job_id: int) -> Finished:
        end = self.end(job_id)
        assert isinstance(end, Finished), end
        return end


def engine_of(backend: ScriptedBackend, **options: object) -> Engine:
    return Engine(backend, SchedulerOptions(**options), clock=Clock())  # type: ignore[arg-type]


def job(job_id: int, prompt: str, max_tokens: int = -1, **fields: object) -> Job:
    return Job(job_id, tokens_of(prompt), SamplingOptions(temperature=0.0), max_tokens, **fields)  # type: ignore[arg-type]


def run_to_end(engine: Engine, log: Log, most_steps: int = 5000) -> Log:
    for _ in range(most_steps):
        if not engine.has_work:
            return log
        log.events += engine.step()
    raise AssertionError(f"still at work after {most_steps} steps")


def text_alone(prompt: str, max_tokens: int, **backend: object) -> str:
    """What a fresh engine answers when it has nothing else to do."""
    engine = engine_of(ScriptedBackend(**backend))  # type: ignore[arg-type]
    engine.submit(job(1, prompt, max_tokens))
    return run_to_end(engine, Log()).text(1)


def check_books(engine: Engine, backend: ScriptedBackend) -> None:
    """What the cache notes about sequences, cells and host memory is what is there."""
    cache = engine.cache
    snapshot = engine.snapshot()
    for sequence in cache.sequences():
        assert backend.held(sequence.id) == sequence.tokens
    noted = {sequence.id for sequence in cache.sequences()}
    assert all(not held for id, held in backend.cells.items() if id not in noted), "cells that nobody holds"
    if backend.unified:
        assert snapshot.cells_used == backend.n_used()
        holders: dict[int, int] = {}
        for held in backend.cells.values():
            for cell in held:
                holders[id(cell)] = holders.get(id(cell), 0) + 1
        assert snapshot.cells_shared == sum(1 for n in holders.values() if n > 1)
    live = [s for s in cache.sequences() if s.live]
    assert len(live) == sum(1 for slot in snapshot.slots if slot.state in (SlotState.PREFILL, SlotState.GENERATING))
    assert snapshot.host_cache_bytes == sum(entry.n_bytes for entry in cache.host.entries())
    assert snapshot.host_cache_bytes <= snapshot.host_cache_limit_bytes
