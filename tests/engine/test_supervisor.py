from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from server.engine.client import EngineClient, EngineState
from server.engine.messages import Failed, FailureKind, Text
from server.engine.options import EngineOptions, ModelOptions, SupervisorOptions
from server.engine.supervisor import GaveUp, Supervisor
from server.errors import LoadError, Unavailable
from tests.support.driving import job

PROGRAM = (sys.executable, "-m", "tests.support.engine_program")


def supervised(path: str = "fine", **options: float) -> tuple[EngineClient, Supervisor]:
    client = EngineClient(max_waiting=8)
    quick = SupervisorOptions(**{"backoff_s": 0.01, **options})  # type: ignore[arg-type]
    engine = EngineOptions(ModelOptions(path, n_slots=4))
    return client, Supervisor(client, engine, quick, command=PROGRAM)


@asynccontextmanager
async def running(path: str = "fine", **options: float) -> AsyncIterator[tuple[EngineClient, Supervisor]]:
    client, supervisor = supervised(path, **options)
    task = asyncio.create_task(supervisor.run())
    await until(client, lambda: client.status.state is EngineState.READY)
    try:
        yield client, supervisor
    finally:
        await supervisor.stop()
        await task


async def until(client: EngineClient, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await client.changed()


async def text_of(client: EngineClient, prompt: str) -> str:
    stream = client.open(job(client.next_job_id(), prompt))
    return "".join([event.text async for event in stream if isinstance(event, Text)])


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_starts_serves_and_leaves_no_process() -> None:
    async with running() as (client, supervisor):
        pid = supervisor.pid
        assert pid is not None
        assert await text_of(client, "hi") == "You said hi."
    assert gone(pid)
    with pytest.raises(Unavailable, match="stopping"):
        client.open(job(1, "hi"))


@pytest.mark.parametrize(("word", "signal_name"), [("KILL", "SIGKILL"), ("ABORT", "SIGABRT")])
async def test_a_death_fails_the_running_and_the_next_one_is_served(word: str, signal_name: str) -> None:
    async with running() as (client, supervisor):
        first = supervisor.pid
        assert await text_of(client, "hi") == "You said hi."
        events = [event async for event in client.open(job(client.next_job_id(), word))]
        end = events[-1]
        assert isinstance(end, Failed)
        assert end.kind is FailureKind.ENGINE
        assert signal_name in end.message
        await until(client, lambda: client.status.state is EngineState.READY)
        assert client.status.restarts == 1
        assert await text_of(client, "again") == "You said again."
        assert supervisor.pid != first


async def test_while_restarting_the_reason_is_told() -> None:
    async with running(backoff_s=30.0) as (client, _):
        [event async for event in client.open(job(client.next_job_id(), "KILL"))]
        assert client.status.state is EngineState.RESTARTING
        with pytest.raises(Unavailable, match=r"restarted: the engine process was ended by SIGKILL") as caught:
            client.open(job(client.next_job_id(), "hi"))
        assert caught.value.retry_after_s >= 30


async def test_a_hang_is_noticed_killed_and_told() -> None:
    async with running(step_timeout_s=1.0) as (client, _):
        events = [event async for event in client.open(job(client.next_job_id(), "HANG"))]
        end = events[-1]
        assert isinstance(end, Failed)
        assert "one step ran longer than 1 s" in end.message
        await until(client, lambda: client.status.state is EngineState.READY)
        assert await text_of(client, "hi") == "You said hi."


async def test_gives_up_after_so_many_deaths_with_the_last_lines() -> None:
    client, supervisor = supervised(max_failures=3)
    task = asyncio.create_task(supervisor.run())
    for _ in range(3):
        await until(client, lambda: client.status.state is EngineState.READY)
        [event async for event in client.open(job(client.next_job_id(), "ABORT"))]
    with pytest.raises(GaveUp, match=r"3 times in a row; giving up(.|\n)*GGML_ASSERT"):
        await task
    assert client.status.state is EngineState.FAILED


async def test_deaths_between_finished_jobs_are_not_in_a_row() -> None:
    async with running(max_failures=2) as (client, _):
        for n in range(3):
            assert await text_of(client, "hi") == "You said hi."
            [event async for event in client.open(job(client.next_job_id(), "KILL"))]
            await until(client, lambda n=n: client.status.restarts == n + 1)  # type: ignore[misc]
            await until(client, lambda: client.status.state is EngineState.READY)


async def test_a_model_that_cannot_be_loaded_is_not_tried_again() -> None:
    client, supervisor = supervised("refuse")
    with pytest.raises(LoadError, match="unknown model architecture 'refuse'"):
        await supervisor.run()
    assert client.status.state is EngineState.FAILED


async def test_a_first_load_that_dies_is_final_and_shows_why() -> None:
    _, supervisor = supervised("die")
    with pytest.raises(GaveUp, match=r"SIGKILL \(out of memory\?\)(.|\n)*ggml_cuda: out of memory"):
        await supervisor.run()


async def test_a_load_that_dies_of_an_illegal_instruction_is_tried_without_repacking() -> None:
    async with running("repack") as (client, _):
        assert await text_of(client, "hi") == "You said hi."
        assert client.status.restarts == 1


async def test_stop_while_it_waits_to_restart_is_prompt() -> None:
    async with running(backoff_s=30.0) as (client, supervisor):
        [event async for event in client.open(job(client.next_job_id(), "KILL"))]
        async with asyncio.timeout(5):
            await supervisor.stop()


async def test_who_is_in_a_hurry_waits_for_nothing_to_be_saved() -> None:
    async with running() as (client, supervisor):
        stream = client.open(job(client.next_job_id(), "HANG"))
        await stream.until_started()
        stopping = asyncio.create_task(supervisor.stop(save_s=600.0))
        supervisor.hurry()
        async with asyncio.timeout(20):
            await stopping
        assert supervisor.pid is not None
        assert gone(supervisor.pid)


async def test_a_missing_program_is_told_in_words() -> None:
    client = EngineClient(max_waiting=8)
    engine = EngineOptions(ModelOptions("fine"))
    supervisor = Supervisor(client, engine, SupervisorOptions(), command=("/no/such/program",))
    with pytest.raises(GaveUp, match=r"cannot be started: .*/no/such/program"):
        await supervisor.run()
