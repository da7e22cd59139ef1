"""The benchmark's client, workloads and command, against a scripted server."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from server.ops.bench.__main__ import main, measure, parse, run
from server.ops.bench.client import BenchError, Client
from server.ops.bench.workloads import WORKLOADS
from tests.ops.bench.scripted_server import Body, ScriptedServer, chunk, serve, whole

USER = [{"role": "user", "content": "hi"}]


async def ask(server: ScriptedServer, n_tokens: int = 3, *, key: str | None = None, model: str | None = None) -> str:
    async with serve(server), Client(server.url + "/", key=key, model=model) as client:
        answer = await client.ask(USER, n_tokens)
    assert (answer.n_prompt, answer.n_cached, answer.n_generated) == (30, 10, n_tokens)
    assert len(answer.deltas_s) == n_tokens
    assert answer.sent_s <= answer.deltas_s[0] <= answer.deltas_s[-1] <= answer.ended_s
    return answer.text


async def test_an_answer_is_read_and_its_request_is_greedy_and_of_fixed_length() -> None:
    server = ScriptedServer()
    assert await ask(server) == "w w w "
    assert server.bodies == [
        {
            "model": "the-model",
            "messages": USER,
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert server.keys == [None]


async def test_key_and_model_are_sent() -> None:
    server = ScriptedServer()
    await ask(server, key="secret", model="mine")
    assert server.keys == ["Bearer secret"]
    assert server.bodies[0]["model"] == "mine"


async def test_reasoning_counts_as_text() -> None:
    def thinking(_body: Body) -> list[bytes]:
        return [b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n', chunk("ok"), b"data: [DONE]\n\n"]

    async with serve(ScriptedServer(answer=thinking)) as server, Client(server.url) as client:
        answer = await client.ask(USER, 2)
    assert answer.text == "hmok"
    assert answer.n_generated == 2  # without usage: the pieces


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (ScriptedServer(status=503), "/v1/models answered 503"),
        (ScriptedServer(models=()), "lists no model; name one with --model"),
        (
            ScriptedServer(answer=lambda _: [chunk("a"), b'data: {"error": {"message": "engine died"}}\n\n']),
            "broke a stream off: .*engine died",
        ),
        (ScriptedServer(answer=lambda _: [b"data: <html>\n\n"]), r"sent what is no chunk \(.*\): <html>"),
        (ScriptedServer(answer=lambda _: [chunk("a")]), r"ended a stream without \[DONE\]"),
    ],
)
async def test_a_server_that_fails_is_a_sentence(server: ScriptedServer, words: str) -> None:
    async with serve(server), Client(server.url) as client:
        with pytest.raises(BenchError, match=words):
            await client.ask(USER, 2)


async def test_a_refused_request_is_a_sentence() -> None:
    async with serve(ScriptedServer(status=429)) as server, Client(server.url, model="x") as client:
        with pytest.raises(BenchError, match=r"answered 429: .*not today"):
            await client.ask(USER, 2)


async def test_health() -> None:
    async with serve(ScriptedServer()) as server, Client(server.url) as client:
        assert await client.is_healthy()
        server.status = 503
        assert not await client.is_healthy()
    async with Client(server.url) as client:
        assert not await client.is_healthy()  # nobody listens there any more


@pytest.mark.parametrize(
    ("name", "n_requests", "n_at_once"),
    [
        ("decode1", 3, 1),
        ("decode4", 8, 4),
        ("decode8", 16, 8),
        ("prefill", 3, 1),
        ("prefix", 8, 8),
        ("sessions", 30, 4),
        ("mix", 4, 4),
    ],
)
async def test_each_workload(name: str, n_requests: int, n_at_once: int) -> None:
    (workload,) = [workload for workload in WORKLOADS if workload.name == name]
    async with serve(ScriptedServer()) as server, Client(server.url) as client:
        first = await workload.run(client, Random(1))
        assert len(server.bodies) == n_requests == len(first.answers) + (first.late is not None)
        assert server.most_at_once <= n_at_once
        sent = sorted(json.dumps(body) for body in server.bodies)
        server.bodies.clear()
        await workload.run(client, Random(1))
        assert sorted(json.dumps(body) for body in server.bodies) == sent  # the same words for the same seed
        server.bodies.clear()
        await workload.run(client, Random(2))
        assert sorted(json.dumps(body) for body in server.bodies) != sent
    assert first.wall_s > 0


async def test_prefix_shares_its_system_prompt_and_sessions_grow() -> None:
    by_name = {workload.name: workload for workload in WORKLOADS}
    async with serve(ScriptedServer()) as server, Client(server.url) as client:
        await by_name["prefix"].run(client, Random(1))
        assert len({body["messages"][0]["content"] for body in server.bodies}) == 1
        assert len({body["messages"][1]["content"] for body in server.bodies}) == 8
        server.bodies.clear()
        await by_name["sessions"].run(client, Random(1))
        lengths = [len(body["messages"]) for body in server.bodies]
        assert lengths == [2] * 10 + [4] * 10 + [6] * 10
        assert server.bodies[-1]["messages"][2] == {"role": "assistant", "content": "w " * 16}


async def test_the_long_prompt_of_mix_comes_when_the_streams_run() -> None:
    order: list[int] = []

    def note(body: Body) -> list[bytes]:
        order.append(len(body["messages"][0]["content"].split()))
        return whole(body)

    (mix,) = [workload for workload in WORKLOADS if workload.name == "mix"]
    async with serve(ScriptedServer(answer=note)) as server, Client(server.url) as client:
        done = await mix.run(client, Random(1))
    assert order == [20, 20, 20, 2000]
    assert done.late is not None


async def test_mix_ends_also_when_whole_answers_come_in_one_piece() -> None:
    def in_one(body: Body) -> list[bytes]:
        return [chunk("all at once"), *whole({**body, "max_tokens": 0})]

    (mix,) = [workload for workload in WORKLOADS if workload.name == "mix"]
    async with serve(ScriptedServer(answer=in_one)) as server, Client(server.url) as client:
        done = await mix.run(client, Random(1))
    assert done.late is not None


async def test_servers_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    workloads = [workload for workload in WORKLOADS if workload.name in {"decode1", "prefill"}]
    async with (
        serve(ScriptedServer()) as one,
        serve(ScriptedServer()) as two,
        Client(one.url) as ours,
        Client(two.url) as theirs,
    ):
        groups = await measure([ours, theirs], workloads, rounds=2, seed=1)
    assert [[summary.server for summary in group] for group in groups] == [[one.url, two.url]] * 2
    assert [group[0].workload for group in groups] == ["decode1", "prefill"]
    turns = [line.split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert turns == [one.url, two.url, two.url, one.url] * 2
    assert one.bodies[1:4] == two.bodies[1:4]  # after the warm-up, the same words


async def test_two_servers_make_a_table_with_ratios() -> None:
    async with serve(ScriptedServer()) as one, serve(ScriptedServer()) as two:
        text = await run(parse(["--url", one.url, "--against", two.url, "--only", "prefill"]))
        lines = await run(parse(["--url", one.url, "--only", "prefill", "--json", "--rounds", "2"]))
    assert [line.split()[0] for line in text.splitlines()] == ["workload", "prefill", two.url, "ratio"]
    line = json.loads(lines)
    assert (line["workload"], line["rounds"], line["requests"]) == ("prefill", 2, 6)


def test_only_known_workloads_and_at_least_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "decode1,nonsense"])
    assert "there is no workload 'nonsense'; choose from decode1, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
    assert [workload.name for workload in parse(["--only", "mix,decode1"]).workloads] == ["decode1", "mix"]


def test_the_list_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [item.name for item in WORKLOADS]


@pytest.mark.parametrize("workload", ["decode4", "prefill"])
async def test_a_failure_ends_the_command_with_one_sentence(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    def once(body: Body) -> list[bytes]:
        return whole(body) if body["max_tokens"] == 8 else []

    async with serve(ScriptedServer(answer=once)) as server:
        status = await asyncio.to_thread(main, ["--url", server.url, "--only", workload])
    assert status == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {server.url} ended a stream without [DONE]"


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("error: Cannot connect to host 127.0.0.1:1")
