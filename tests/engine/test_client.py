from __future__ import annotations

import asyncio
import threading

import pytest

from server.engine.backend import DecodeStatus, Piece
from server.engine.client import EngineState, EngineStatus
from server.engine.messages import Failed, FailureKind, Finished, SlotState, Snapshot, Span, Started, Text
from server.engine.options import SchedulerOptions
from server.errors import InvalidRequest, QueueFull, Unavailable
from tests.support.driving import job
from tests.support.engine import scripted_client
from tests.support.scripted import ScriptedBackend


class Gate:
    """Holds the engine inside a decode until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, pieces: list[Piece]) -> DecodeStatus | None:
        self.entered.set()
        assert self.open.wait(10)
        return None


async def collect(stream: object) -> str:
    text = ""
    async for event in stream:  # type: ignore[attr-defined]
        if isinstance(event, Text):
            text += event.text
    return text


async def test_a_job_is_a_stream_that_ends_with_finished() -> None:
    async with scripted_client() as client:
        events = [event async for event in client.open(job(client.next_job_id(), "hi"))]
        assert "".join(event.text for event in events if isinstance(event, Text)) == "You said hi."
        assert isinstance(events[-1], Finished)
        assert not client.jobs


async def test_sixteen_jobs_at_once_keep_their_texts_apart() -> None:
    async with scripted_client() as client:
        streams = [client.open(job(client.next_job_id(), f"job {i}")) for i in range(16)]
        assert await asyncio.gather(*map(collect, streams)) == [f"You said job {i}." for i in range(16)]


async def test_vocabulary_questions_are_answered_during_a_decode() -> None:
    gate = Gate()
    async with scripted_client(ScriptedBackend(reply=lambda _: "ok", on_decode=gate)) as client:
        stream = client.open(job(client.next_job_id(), "hi"))
        await asyncio.to_thread(gate.entered.wait, 10)
        spans = [Span("<|user|>", special=True), Span("<|user|>", special=False)]
        tokens = await client.tokenize(spans, add_special=False)
        assert tokens == [257, *b"<|user|>"]
        assert await client.detokenize(tokens) == "<|user|><|user|>"
        assert await client.pieces([72]) == [b"H"]
        with pytest.raises(InvalidRequest, match="token 999 is not in the vocabulary"):
            await client.detokenize([999])
        with pytest.raises(InvalidRequest, match="token -1 is not in the vocabulary"):
            await client.pieces([-1])
        gate.open.set()
        assert await collect(stream) == "ok"


async def test_cancel_ends_the_stream_and_frees_the_slot() -> None:
    backend = ScriptedBackend()
    async with scripted_client(backend) as client:
        stream = client.open(job(client.next_job_id(), "endless"))
        async for event in stream:
            if isinstance(event, Text):
                break
        stream.cancel()
        stream.cancel()
        end = [event async for event in stream][-1]
        assert isinstance(end, Failed)
        assert end.kind is FailureKind.CANCELLED
        assert await collect(client.open(job(client.next_job_id(), "next", 3))) != ""
        assert backend.n_open_samplers == 0


async def test_a_full_queue_is_refused_at_once_with_an_estimate() -> None:
    gate = Gate()
    backend = ScriptedBackend(n_slots=1, reply=lambda _: "ok", on_decode=gate)
    async with scripted_client(backend, SchedulerOptions(max_waiting=2)) as client:
        streams = [client.open(job(client.next_job_id(), "hi")) for _ in range(3)]
        with pytest.raises(QueueFull, match="2 requests are waiting for 1 slots") as caught:
            client.open(job(client.next_job_id(), "one too many"))
        assert caught.value.retry_after_s >= 1
        gate.open.set()
        assert await asyncio.gather(*map(collect, streams)) == ["ok"] * 3
        assert await collect(client.open(job(client.next_job_id(), "hi"))) == "ok"


async def test_a_dead_engine_fails_what_ran_and_offers_what_waited_again() -> None:
    gate = Gate()
    backend = ScriptedBackend(n_slots=1, reply=lambda _: "ok", on_decode=gate)
    async with scripted_client(backend) as client:
        running = client.open(job(client.next_job_id(), "hi"))
        started = await anext(running)
        waiting = client.open(job(client.next_job_id(), "hi"))
        client.fail_all("the engine process was ended by SIGKILL")
        end = [event async for event in running][-1]
        assert started.job_id == end.job_id
        assert isinstance(end, Failed)
        assert (end.kind, end.message) == (FailureKind.ENGINE, "the engine process was ended by SIGKILL")
        (refused,) = [event async for event in waiting]
        assert isinstance(refused, Failed)
        assert refused.kind is FailureKind.UNAVAILABLE
        gate.open.set()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (EngineStatus(EngineState.LOADING, phase="loading the model", progress=0.5), "loading the model"),
        (EngineStatus(EngineState.RESTARTING, reason="it died", retry_after_s=7), "being restarted: it died"),
        (EngineStatus(EngineState.STOPPING), "the server is stopping"),
        (EngineStatus(EngineState.FAILED, reason="no more"), "failed: no more"),
    ],
)
async def test_nothing_is_opened_while_the_engine_is_not_ready(status: EngineStatus, words: str) -> None:
    async with scripted_client() as client:
        client.status = status
        with pytest.raises(Unavailable, match=words) as caught:
            client.open(job(client.next_job_id(), "hi"))
        assert caught.value.retry_after_s == status.retry_after_s
        assert caught.value.progress == status.progress
        with pytest.raises(Unavailable, match=words):
            await client.tokenize([Span("hi", special=False)], add_special=False)


async def test_snapshots_are_pushed_and_the_last_one_is_idle() -> None:
    seen: list[Snapshot] = []
    async with scripted_client() as client:
        client.on_snapshot = seen.append
        await collect(client.open(job(client.next_job_id(), "hi")))
        while not seen or seen[-1].counters.jobs_finished < 1:
            await client.tokenize([Span("x", special=False)], add_special=False)
        assert client.snapshot is seen[-1]
        assert {slot.state for slot in seen[-1].slots} == {SlotState.IDLE}
        assert client.in_step_ms == 0.0


async def test_a_long_text_being_tokenised_holds_up_nobody() -> None:
    class Slow(ScriptedBackend):
        gate = threading.Event()

        def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]:
            if spans[0].text == "slow":
                assert self.gate.wait(10)
            return super().tokenize(spans, add_special=add_special)

    backend = Slow(reply=lambda _: "ok")
    async with scripted_client(backend) as client:
        slow = asyncio.create_task(client.tokenize([Span("slow", special=False)], add_special=False))
        await asyncio.sleep(0)
        assert await client.tokenize([Span("a", special=False)], add_special=False) == [97]
        assert await collect(client.open(job(client.next_job_id(), "hi"))) == "ok"
        assert not slow.done()
        backend.gate.set()
        assert await slow == list(b"slow")


async def test_a_fault_in_a_vocabulary_question_is_an_answer() -> None:
    class Broken(ScriptedBackend):
        def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]:
            raise ValueError("no")

    async with scripted_client(Broken()) as client:
        with pytest.raises(InvalidRequest, match="ValueError: no"):
            await client.tokenize([Span("a", special=False)], add_special=False)


async def test_the_wait_counts_from_the_arrival_of_a_job() -> None:
    gate = Gate()
    async with scripted_client(ScriptedBackend(n_slots=2, reply=lambda _: "ok", on_decode=gate)) as client:
        first = client.open(job(client.next_job_id(), "hi"))
        await asyncio.to_thread(gate.entered.wait, 10)
        second = client.open(job(client.next_job_id(), "hi there"))
        # answered by another thread, after the job has arrived: the engine is still in its decode
        await client.tokenize([Span("x", special=False)], add_special=False)
        held_ms = 30.0
        await asyncio.to_thread(threading.Event().wait, held_ms / 1e3)
        gate.open.set()
        await collect(first)
        started = await anext(second)
        assert isinstance(started, Started)
        assert started.queue_ms >= held_ms
