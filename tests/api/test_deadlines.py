"""Time limits: each ends the request with an error that names its setting, and frees the slot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from server.api.deadlines import Deadlines
from server.api.errors import TimedOut
from server.api.options import HttpOptions
from server.chat.options import ChatOptions
from server.engine.messages import Counters, Job, SlotState, SlotView, Snapshot
from server.errors import GlmserveError, Unavailable
from server.service import ChatService, GenerationOptions
from tests.support.engine import scripted_client
from tests.support.http import Gate, assert_idle, frames_of, generating, served
from tests.support.scripted import ScriptedBackend


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 1), (True, 3), (False, 3)])
async def test_a_request_may_live_so_long(stream: bool, n: int) -> None:
    async with served(request_limit_s=0.05) as s:
        s.backend.reply = None  # without end
        s.backend.on_decode = None
        response = await s.chat(stream=stream, max_tokens=-1, n=n)
        await assert_idle(s.engine)
        (record,) = await s.metrics.finished(1)
    error = frames_of(response.text).data[-1]["error"] if stream else response.json()["error"]
    assert (error["code"], error["type"], error["reason"]) == (504, "timeout_error", "timeout")
    assert "longer than 0.05 s (--request-limit)" in error["message"]
    assert response.status_code == (200 if stream else 504)
    assert (record.error_code, record.disconnected) == ("timeout", False)


@pytest.mark.parametrize(("stream", "ping"), [(True, 30.0), (True, 0.01), (True, None), (False, 30.0)])
async def test_a_request_may_wait_so_long_for_a_slot(stream: bool, ping: float | None) -> None:
    """A stream that may be silent for so long is refused by its status; else it has begun."""
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", n_slots=1, on_decode=gate)
    async with served(backend, queue_timeout_s=0.05, ping_interval_s=ping) as s:
        held = await ChatService(s.engine, ChatOptions()).open_completion([("a",)], GenerationOptions())
        await gate.entered(s.engine)
        response = await s.chat(stream=stream)
        gate.open()
        assert [event async for event in held]
        await assert_idle(s.engine)
        (record,) = await s.metrics.finished(1)
        metrics = (await s.http.get("/metrics")).text
    assert record.timings[0].queue_ms >= 50  # that is where its time went
    begun = stream and ping == 0.01
    error = frames_of(response.text).data[-1]["error"] if begun else response.json()["error"]
    assert (error["code"], error["type"], error["reason"]) == (503, "unavailable_error", "queue_timeout")
    assert "no slot became free within 0.05 s (--queue-timeout)" in error["message"]
    assert response.status_code == (200 if begun else 503)
    assert response.headers.get("retry-after") == (None if begun else "5")
    assert 'glmserve_requests_refused_total{key="none",reason="queue_timeout"} 1.0' in metrics


async def test_a_stream_that_gets_a_slot_in_time_begins() -> None:
    async with served(queue_timeout_s=5.0) as s:
        assert (await s.chunks()).text == "<hello>"


async def test_an_engine_that_stands_still_ends_the_request() -> None:
    gate = Gate(generating(1))
    async with served(ScriptedBackend(on_decode=gate), timeout_s=0.05) as s:
        response = await s.chat()
        await gate.release(s.engine)
        await assert_idle(s.engine)
    assert response.status_code == 504
    assert "made no progress with the request for 0.05 s (--timeout)" in response.json()["error"]["message"]


class Silent:
    """Stands for a generation that yields nothing, and for its engine. `pace`: prompt tokens read between two looks."""

    def __init__(self, *, queued: bool = False, pace: int = 0) -> None:
        self.waits_in_queue = queued
        self.choices = [SimpleNamespace(stream=SimpleNamespace(job=Job(7, [1])))]
        self._pace = pace
        self._n_read = 0
        self.error: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def __anext__(self) -> NoReturn:
        await self.error
        raise AssertionError("unreachable")

    def interrupt(self, error: GlmserveError) -> None:
        self.error.set_exception(error)

    @property
    def snapshot(self) -> Snapshot:
        self._n_read += self._pace
        slots = [
            SlotView(0, SlotState.GENERATING, 100, job_id=6, n_decoded=self._n_read),
            SlotView(1, SlotState.PREFILL, 100, job_id=7, n_processed=self._n_read),
        ]
        return Snapshot(slots, 0, Counters(), 100, 0, 0.0, 0.0)


@pytest.mark.parametrize(("queued", "pace"), [(False, 1), (True, 0)])
async def test_reading_a_long_prompt_and_waiting_are_no_stand_still(queued: bool, pace: int) -> None:
    silent: Any = Silent(queued=queued, pace=pace)
    deadlines = Deadlines(silent, silent, HttpOptions(timeout_s=0.01))
    with pytest.raises(TimeoutError):  # the test's own, which is twenty times longer
        await asyncio.wait_for(deadlines.next_event(), 0.2)


async def test_a_client_that_takes_nothing_is_no_stand_still_of_the_engine() -> None:
    silent: Any = Silent()
    deadlines = Deadlines(silent, silent, HttpOptions(timeout_s=0.01))
    with pytest.raises(TimeoutError):  # nobody waits for an event
        await asyncio.wait_for(asyncio.shield(silent.error), 0.1)
    with pytest.raises(TimedOut):
        await deadlines.next_event()


async def test_nothing_is_watched_after_the_end() -> None:
    silent: Any = Silent()
    deadlines = Deadlines(silent, silent, HttpOptions(request_limit_s=0.01))
    deadlines.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(silent.error), 0.1)


async def test_progress_of_others_does_not_count() -> None:
    silent: Any = Silent(pace=1)
    silent.choices = []
    with pytest.raises(TimedOut):
        await Deadlines(silent, silent, HttpOptions(timeout_s=0.01)).next_event()


async def test_limits_can_be_off() -> None:
    async with served(timeout_s=0.0, queue_timeout_s=None, request_limit_s=None) as s:
        assert (await s.chat()).status_code == 200


async def test_the_first_limit_that_is_passed_counts() -> None:
    gate = Gate()
    backend = ScriptedBackend(n_slots=1, on_decode=gate)
    async with scripted_client(backend) as engine:
        service = ChatService(engine, ChatOptions())
        running = await service.open_completion([("a",)], GenerationOptions())
        waiting = await service.open_completion([("b",)], GenerationOptions())
        queue = Deadlines(waiting, engine, HttpOptions(queue_timeout_s=0.01, request_limit_s=5))
        with pytest.raises(Unavailable):
            await queue.next_event()
        longer = await service.open_completion([("b",)], GenerationOptions())
        life = Deadlines(longer, engine, HttpOptions(queue_timeout_s=5, request_limit_s=0.01))
        with pytest.raises(TimedOut):
            await life.next_event()
        for generation in (running, waiting, longer):
            generation.close()
        gate.open()
