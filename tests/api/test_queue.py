"""What keys mean for the queue: whose job it is, who goes first, who is refused."""

from __future__ import annotations

import asyncio

import pytest

from server.api.options import ApiKey
from server.engine.client import EngineClient
from server.engine.options import SchedulerOptions
from tests.support.http import HELLO, Gate, served
from tests.support.scripted import ScriptedBackend

KEYS = (ApiKey("a", "alice"), ApiKey("b", "batch", max_jobs=1, priority=10), ApiKey("v", "vip", priority=-5))


async def opened(engine: EngineClient, n: int) -> None:
    """So many jobs are open."""
    async with asyncio.timeout(20):
        while len(engine.jobs) < n:
            await engine.tokenize([], add_special=False)


@pytest.mark.parametrize(
    ("key", "asked", "owner", "limit", "priority"),
    [
        ("a", None, "alice", 0, 0),
        ("a", 3, "alice", 0, 3),
        ("a", -3, "alice", 0, 0),
        ("b", 0, "batch", 1, 10),
        ("v", None, "vip", 0, -5),
        ("v", -9, "vip", 0, -5),
        ("v", 2, "vip", 0, 2),
    ],
)
async def test_a_job_belongs_to_its_key(key: str, asked: int | None, owner: str, limit: int, priority: int) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/completion", {"prompt": "hello"}),
    ):
        gate = Gate()
        async with served(ScriptedBackend(reply=lambda _: "x", on_decode=gate), api_keys=KEYS) as s:
            asking = asyncio.create_task(s.post(path, body | {"priority": asked}, x_api_key=key))
            await gate.entered(s.engine)
            (job,) = s.engine.jobs.values()
            assert (job.owner, job.owner_limit, job.priority) == (owner, limit, priority)
            gate.open()
            assert (await asking).status_code == 200


async def test_without_keys_a_request_may_ask_for_any_priority() -> None:
    gate = Gate()
    async with served(ScriptedBackend(reply=lambda _: "x", on_decode=gate)) as s:
        asking = asyncio.create_task(s.chat(priority=-7))
        await gate.entered(s.engine)
        (job,) = s.engine.jobs.values()
        assert (job.owner, job.owner_limit, job.priority) == ("", 0, -7)
        gate.open()
        assert (await asking).status_code == 200
        wrong = await s.chat(priority="high")
    assert wrong.status_code == 400
    assert "priority" in wrong.json()["error"]["message"]


async def test_the_slots_page_and_the_metrics_name_the_key() -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", n_slots=1, on_decode=gate)
    async with served(backend, api_keys=KEYS) as s:
        first = asyncio.create_task(s.post("/v1/completions", {"prompt": "one"}, x_api_key="a"))
        await gate.entered(s.engine)
        second = asyncio.create_task(s.post("/v1/completions", {"prompt": "two", "priority": 4}, x_api_key="v"))
        await opened(s.engine, 2)
        metrics = (await s.http.get("/metrics", headers={"x-api-key": "a"})).text
        for line in (
            'glmserve_jobs{key="alice",state="running"} 1.0',
            'glmserve_jobs{key="alice",state="waiting"} 0.0',
            'glmserve_jobs{key="batch",state="waiting"} 0.0',
            'glmserve_jobs{key="vip",state="waiting"} 1.0',
        ):
            assert line in metrics
        gate.open()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        records = await s.metrics.finished(3)
    assert sorted(record.key_label for record in records) == ["alice", "alice", "vip"]


async def test_one_key_cannot_fill_the_queue() -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", n_slots=1, on_decode=gate)
    async with served(backend, scheduler=SchedulerOptions(max_waiting=4), api_keys=KEYS) as s:

        def ask(key: str) -> asyncio.Task[int]:
            async def status() -> int:
                response = await s.post("/v1/completions", {"prompt": f"from {key}"}, x_api_key=key)
                if response.status_code == 429:
                    error = response.json()["error"]
                    assert error["reason"] == "queue_full"
                    assert response.headers["retry-after"] == str(error["retry_after"])
                return response.status_code

            return asyncio.create_task(status())

        greedy = [ask("a")]
        await gate.entered(s.engine)
        greedy += [ask("a") for _ in range(5)]
        await s.metrics.finished(2)
        modest = ask("v")
        await opened(s.engine, 5)
        gate.open()
        assert sorted(await asyncio.gather(*greedy)) == [200, 200, 200, 200, 429, 429]
        assert await modest == 200
        metrics = (await s.http.get("/metrics", headers={"x-api-key": "a"})).text
        assert 'glmserve_requests_refused_total{key="alice",reason="queue_full"} 2.0' in metrics
        assert 'glmserve_requests_refused_total{key="vip",reason="queue_full"} 0.0' in metrics


async def test_more_answers_than_a_key_can_ever_have_are_refused_with_the_numbers() -> None:
    async with served(ScriptedBackend(n_slots=1), scheduler=SchedulerOptions(max_waiting=4), api_keys=KEYS) as s:
        response = await s.post("/v1/completions", {"prompt": "p", "n": 5}, x_api_key="a")
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "asks for 5 answers, but 4 are the most" in error["message"]
