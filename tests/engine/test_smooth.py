"""Running answers and prompts side by side: nobody stands still, whatever a step costs. The backend takes its time by a
clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from server.engine.backend import DecodeStatus, Piece
from server.engine.engine import Engine
from server.engine.messages import Finished, Text
from server.engine.options import SchedulerOptions
from tests.support.driving import job
from tests.support.scripted import ScriptedBackend

STALL_MS = 400.0
STREAMS = 2


@dataclass
class Machine:
    """An engine on a machine where a step with generating rows takes `decode_ms` and every prompt token `token_ms`."""

    decode_ms: float
    token_ms: float
    now: float = 0.0
    read: dict[int, int] = field(default_factory=dict)  # prompt tokens of the last step, by slot
    mixed_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        backend = ScriptedBackend(n_slots=8, n_ctx=1 << 16, n_batch=2048, n_ubatch=512, on_decode=self._take_time)
        self.engine = Engine(backend, SchedulerOptions(max_stall_ms=STALL_MS), clock=lambda: self.now)
        self.generating: set[int] = set()

    def _take_time(self, pieces: list[Piece]) -> DecodeStatus | None:
        busy = {view.id for view in self.engine.snapshot().slots if view.state == "generating"}
        self.read = {piece.sequence: len(piece.tokens) for piece in pieces if piece.sequence not in busy}
        step_ms = (self.decode_ms if busy else 0.0) + self.token_ms * sum(self.read.values())
        assert busy <= {piece.sequence for piece in pieces}, "a running answer stood still"
        if busy and self.read:
            self.mixed_ms.append(step_ms)
        self.now += step_ms / 1e3
        return None

    def start_streams(self, prompt: str = "s" * 100) -> None:
        for i in range(STREAMS):
            self.engine.submit(job(i, f"{i}{prompt}"))
        for _ in range(12):
            self.engine.step()
        self.mixed_ms.clear()

    def until_read(self, job_id: int, most_steps: int = 5000) -> float:
        """Seconds until the job's first text."""
        began = self.now
        for _ in range(most_steps):
            for event in self.engine.step():
                if isinstance(event, Text | Finished) and event.job_id == job_id:
                    return self.now - began
        raise AssertionError(f"job {job_id} is not read after {most_steps} steps")


@pytest.mark.parametrize("prompt", ["s" * 100, ""], ids=["measured alone", "never read alone"])
@pytest.mark.parametrize(("decode_ms", "token_ms"), [(20, 0.5), (100, 4), (390, 2), (500, 5), (900, 20)])
def test_a_long_prompt_has_a_quarter_of_the_stall_time_whatever_decoding_costs(
    decode_ms: float, token_ms: float, prompt: str
) -> None:
    machine = Machine(decode_ms, token_ms)
    machine.start_streams(prompt)
    n_tokens = 3000
    machine.engine.submit(job(99, "x" * n_tokens, 1))
    took_s = machine.until_read(99)
    part = max(STALL_MS - decode_ms, STALL_MS / 4)  # of a step
    assert took_s <= 1.5 * n_tokens * token_ms / 1e3 * (decode_ms + part) / part
    # the guaranteed part may go over the target, and the rounding to whole tiles by half a tile
    longest_ms = max(STALL_MS, decode_ms + STALL_MS / 4) + 32 * token_ms
    first = 0 if prompt else 1  # the very first chunk is a guess
    assert max(machine.mixed_ms[first:]) <= longest_ms * 1.01


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    machine = Machine(40, 2)
    machine.start_streams()
    for job_id in (10, 11, 12):
        machine.engine.submit(job(job_id, str(job_id) * 4000, 1))
    for _ in range(4):
        machine.engine.step()
    machine.engine.submit(job(20, "short" * 20, 1))
    assert machine.until_read(20) < 1.0


def test_long_prompts_all_advance_and_none_loses_by_it() -> None:
    """The one that is done soonest has the most, the others a guaranteed part; together they take what one after the
    other would."""
    machine = Machine(40, 2)
    machine.start_streams()
    for job_id in (10, 11, 12):
        machine.engine.submit(job(job_id, str(job_id)[-1] * 4000, 1))
    machine.engine.step()
    began = machine.now
    ends: list[float] = []
    while len(ends) < 3:
        n_ended = sum(isinstance(event, Finished) for event in machine.engine.step())
        ends += [machine.now - began] * n_ended
        if not ends and len(machine.read) == 3:
            room = sum(machine.read.values())
            assert min(machine.read.values()) >= int(room / 3 / 4)
    work_s = 3 * 4000 * 2 / 1e3
    assert ends[0] < 0.7 * work_s
    assert ends[-1] < 1.25 * work_s


def test_with_fewer_rows_than_prompts_they_take_turns() -> None:
    """A machine so slow that a step has room for two prompt tokens: the first two prompts must not have them all."""
    machine = Machine(300, 50)
    machine.start_streams("")
    for job_id in (10, 11, 12, 13):
        machine.engine.submit(job(job_id, str(job_id)[-1] * 400, 1))
    machine.engine.submit(job(20, "short", 1))
    assert machine.until_read(20) < 60 * 5 * 0.5
