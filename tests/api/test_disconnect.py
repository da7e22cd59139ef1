"""Clients that leave: through the whole stack, over real sockets, wherever their request is."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from sse_starlette.sse import AppStatus

from server.engine.backend import Piece
from tests.support.http import HELLO, Gate, Served, assert_idle, frames_of, generating, keys_of, listening, served
from tests.support.scripted import ScriptedBackend

LONG = [{"role": "user", "content": "p" * 300}]
Protocol = Literal["h11", "httptools"]


def request(path: str, body: dict[str, Any], headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@asynccontextmanager
async def connection(base: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def live(
    backend: ScriptedBackend, protocol: Protocol = "httptools", **options: Any
) -> AsyncIterator[tuple[Served, str]]:
    """Keys and CORS on, as an operator would have them."""
    async with served(backend, api_keys=keys_of("k"), **options) as s, listening(s.app, protocol) as (base, _):
        yield s, base


def reading(pieces: list[Piece]) -> bool:
    return any(len(piece.tokens) > 1 for piece in pieces)


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_generating(stream: bool, protocol: Protocol) -> None:
    gate = Gate(generating(1))
    async with live(ScriptedBackend(on_decode=gate), protocol) as (s, base), connection(base) as (_, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO, "stream": stream}))
        await gate.entered(s.engine)
        await leave(writer)
        (record,) = await s.metrics.finished(1)
        await gate.release(s.engine)
        await assert_idle(s.engine)
        assert s.engine.snapshot is not None
        assert s.engine.snapshot.counters.jobs_cancelled == 1
    assert record.disconnected
    assert record.status == (200 if stream else 499)
    assert record.stream is stream
    assert record.timings[0].predicted_n < 20, "the job went on for long"


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_the_prompt_is_read(stream: bool, protocol: Protocol) -> None:
    gate = Gate(reading)
    backend = ScriptedBackend(n_batch=16, on_decode=gate)
    async with live(backend, protocol) as (s, base), connection(base) as (_, writer):
        writer.write(request("/v1/chat/completions", {"messages": LONG, "stream": stream}))
        await gate.entered(s.engine)
        await leave(writer)
        (record,) = await s.metrics.finished(1)
        await gate.release(s.engine)
        await assert_idle(s.engine)
    assert record.disconnected
    of_prompt = [piece for batch in backend.batches for piece in batch if set(piece.tokens) == {ord("p")}]
    assert len(of_prompt) == 1, "reading went on after the step in which the client left"


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_queued(stream: bool) -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", n_slots=1, on_decode=gate)
    async with live(backend) as (s, base), connection(base) as (_, writer), connection(base) as (reader, first):
        first.write(request("/v1/chat/completions", {"messages": HELLO}))
        await gate.entered(s.engine)
        writer.write(request("/v1/chat/completions", {"messages": LONG, "stream": stream}))
        async with asyncio.timeout(10):
            while len(s.engine.jobs) < 2:
                await s.engine.tokenize([], add_special=False)
        await leave(writer)
        (record,) = await s.metrics.finished(1)
        assert record.disconnected
        await gate.release(s.engine)
        assert b"200 OK" in await reader.readline()
        await assert_idle(s.engine)
    assert not any(ord("p") in piece.tokens for batch in backend.batches for piece in batch), "it ran all the same"


async def test_leaving_with_several_choices_cancels_them_all() -> None:
    gate = Gate(generating(3))
    async with live(ScriptedBackend(on_decode=gate)) as (s, base), connection(base) as (_, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO, "n": 3, "stream": True}))
        await gate.entered(s.engine)
        await leave(writer)
        await s.metrics.finished(1)
        await gate.release(s.engine)
        await assert_idle(s.engine)
        assert s.engine.snapshot is not None
        assert s.engine.snapshot.counters.jobs_cancelled == 3


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
async def test_leaving_is_noticed_after_a_body_that_stopped_the_reading(protocol: Protocol) -> None:
    """Beyond 64 KiB uvicorn stops reading from the socket until somebody asks for more."""
    gate = Gate()
    async with live(ScriptedBackend(on_decode=gate), protocol) as (s, base), connection(base) as (_, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO, "user": "u" * 200_000}))
        await gate.entered(s.engine)
        await leave(writer)
        (record,) = await s.metrics.finished(1)
        await gate.release(s.engine)
        await assert_idle(s.engine)
    assert (record.disconnected, record.status) == (True, 499)


async def test_leaving_in_the_middle_of_the_body() -> None:
    async with live(ScriptedBackend()) as (s, base), connection(base) as (_, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO})[:-5])
        await writer.drain()
        await leave(writer)
        (record,) = await s.metrics.finished(1)
    assert (record.disconnected, record.status, record.timings) == (True, 499, ())


async def test_a_kept_connection_serves_one_request_after_the_other_and_then_notices() -> None:
    gate = Gate(lambda pieces: any(piece.start == 300 for piece in pieces))
    async with (
        live(ScriptedBackend(reply=lambda p: p[:3], on_decode=gate)) as (s, base),
        connection(base) as (reader, writer),
    ):
        for _ in range(3):
            writer.write(request("/v1/chat/completions", {"messages": HELLO}))
            assert b"200 OK" in await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split()[1])
            assert b"hel" in await reader.readexactly(length)
        writer.write(request("/v1/chat/completions", {"messages": LONG}))
        await gate.entered(s.engine)
        await leave(writer)
        *answered, left = await s.metrics.finished(4)
        await gate.release(s.engine)
        await assert_idle(s.engine)
    assert [record.status for record in answered] == [200] * 3
    assert not any(record.disconnected for record in answered)
    assert left.disconnected


async def test_a_flood_of_leavers_leaves_no_trace() -> None:
    backend = ScriptedBackend(n_slots=2, chat_template="{{ messages[0].content }}")
    async with live(backend) as (s, base):

        async def come_and_go(i: int) -> None:
            async with connection(base) as (reader, writer):
                writer.write(request("/v1/chat/completions", {"messages": HELLO, "stream": i % 2 == 0}))
                if i % 3:
                    await writer.drain()
                if i % 4 == 0:
                    await reader.readline()
                await leave(writer)

        await asyncio.gather(*(come_and_go(i) for i in range(120)))
        normal = await s.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3}, x_api_key="k")
        assert normal.status_code == 200
        await s.metrics.finished(121)
        await assert_idle(s.engine)
        assert backend.n_open_samplers == 0


async def test_a_whole_answer_is_not_cut_by_a_client_that_stays() -> None:
    async with live(ScriptedBackend(reply=lambda p: p * 50)) as (s, base), connection(base) as (reader, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO, "stream": True}, "Connection: close\r\n"))
        text = (await reader.read()).decode()
        (record,) = await s.metrics.finished(1)
    assert text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not record.disconnected


async def test_a_client_that_takes_nothing_more_is_left() -> None:
    """It stays connected, so that nothing but the clock can tell."""
    backend = ScriptedBackend(reply=lambda _: "x" * 1000)
    long_name = "m" * 20_000  # makes each chunk large, so that the buffers of the sockets are soon full
    async with live(backend, timeout_s=0.2, model_names=(long_name,), ping_interval_s=None) as (s, base):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(base.rpartition(":")[2])))
            client.sendall(request("/v1/chat/completions", {"messages": HELLO, "stream": True}))
            (record,) = await s.metrics.finished(1)
        await assert_idle(s.engine)
    assert (record.disconnected, record.error_code) == (True, "send_timeout")


# ── what goes out while nothing is said ──────────────────────────────────────────────────────────────────────────────


async def read_head(reader: asyncio.StreamReader) -> str:
    async with asyncio.timeout(10):
        return (await reader.readuntil(b"\r\n\r\n")).decode().lower()


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
async def test_headers_go_out_at_once_and_pings_by_the_clock(protocol: Protocol) -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", on_decode=gate)
    async with live(backend, protocol, ping_interval_s=0.02) as (s, base), connection(base) as (reader, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO, "stream": True}))
        head = await read_head(reader)
        assert "200 ok" in head
        assert "x-accel-buffering: no" in head
        assert "cache-control: no-cache" in head
        async with asyncio.timeout(10):  # the engine stands still in one step all the while
            for _ in range(3):
                await reader.readuntil(b": \n\n")
        gate.open()
        rest = await reader.readuntil(b"[DONE]\n\n")
        await s.metrics.finished(1)
    assert b'"content":"x"' in rest


@pytest.mark.parametrize(
    ("interval", "asked"), [(None, None), (0.01, -1), (0.01, 0)], ids=["off", "off by request", "zero by request"]
)
async def test_pings_can_be_off(interval: float | None, asked: int | None) -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", on_decode=gate)
    async with live(backend, ping_interval_s=interval) as (s, base), connection(base) as (reader, writer):
        writer.write(request("/v1/chat/completions", {"messages": HELLO, "stream": True, "sse_ping_interval": asked}))
        await read_head(reader)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        gate.open()
        assert b": \n\n" not in await reader.readuntil(b"[DONE]\n\n")
        await s.metrics.finished(1)


async def test_a_server_that_is_told_to_stop_lets_streams_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """sse-starlette would end them at once."""
    gate = Gate(generating(1))
    backend = ScriptedBackend(reply=lambda p: p * 20, on_decode=gate)
    async with served(backend) as s:
        running = asyncio.create_task(s.chat(stream=True))
        await gate.entered(s.engine)
        monkeypatch.setattr(AppStatus, "should_exit", True)
        late = asyncio.create_task(s.chat(stream=True))
        async with asyncio.timeout(10):
            while len(s.engine.jobs) < 2:
                await s.engine.tokenize([], add_special=False)
        gate.open()
        answers = [frames_of((await task).text) for task in (running, late)]
    assert [answer.text for answer in answers] == ["hello" * 20] * 2
    assert all(answer.done for answer in answers)
