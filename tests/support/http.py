"""The HTTP side around a scripted engine: in process through httpx, or on a loopback port through uvicorn."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import uvicorn
from starlette.types import ASGIApp

from server.api.app import create_api
from server.api.options import ApiKey, HttpOptions
from server.chat.options import ChatOptions
from server.engine.backend import DecodeStatus, Piece
from server.engine.client import EngineClient
from server.engine.messages import Job, SamplingOptions, SlotState
from server.engine.options import DiskOptions, SchedulerOptions
from server.ops.metrics import Metrics
from server.ops.record import RequestRecord
from server.service import ChatService
from tests.support.engine import scripted_client
from tests.support.scripted import ScriptedBackend

CONCAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


class Gate:
    """Holds the engine inside those of its decodes that fit `when`, until it is opened. Use it as
    `ScriptedBackend.on_decode`."""

    def __init__(self, when: Callable[[list[Piece]], bool] = lambda _: True) -> None:
        self._when = when
        self._entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, pieces: list[Piece]) -> DecodeStatus | None:
        if self._when(pieces):
            self._entered.set()
            assert self._open.wait(20), "the gate was never opened"
        return None

    async def entered(self, engine: EngineClient) -> None:
        """The engine is held, and the client has all that it sent before."""
        assert await asyncio.to_thread(self._entered.wait, 20), "the engine never came to the gate"
        await engine.tokenize([], add_special=False)  # answers come in the order of the events

    async def release(self, engine: EngineClient) -> None:
        """Let the engine go on, once it has everything that the client sent before."""
        await engine.tokenize([], add_special=False)
        self._open.set()

    def open(self) -> None:
        self._open.set()


class WatchedMetrics(Metrics):
    """Metrics that also keep the records, so that a test can wait for the end of a request."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        super().__init__(keys)
        self.records: list[RequestRecord] = []
        self._changed = asyncio.Event()

    def request_finished(self, record: RequestRecord) -> None:
        super().request_finished(record)
        self.records.append(record)
        self._changed.set()

    async def finished(self, n: int) -> list[RequestRecord]:
        """The first `n` records, when there are so many."""
        async with asyncio.timeout(20):
            while len(self.records) < n:
                self._changed.clear()
                await self._changed.wait()
        return self.records[:n]


def keys_of(*secrets: str) -> tuple[ApiKey, ...]:
    return tuple(ApiKey(secret, f"key {number}") for number, secret in enumerate(secrets, 1))


@dataclass
class Served:
    """A running API. `http` speaks to it with no network between."""

    http: httpx.AsyncClient
    app: ASGIApp
    engine: EngineClient
    backend: ScriptedBackend
    metrics: WatchedMetrics

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": HELLO} | fields)

    async def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> Frames:
        body = {"messages": HELLO} | fields if path.endswith("/chat/completions") else fields
        response = await self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        return frames_of(response.text)


@dataclass
class Frames:
    """What an event stream carried."""

    data: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    comments: int = 0

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for chunk in self.data for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(delta.get("content") or "" for delta in self.deltas)


def frames_of(text: str) -> Frames:
    """Reads an event stream strictly: only data and comment lines, one of them to a frame."""
    assert text.endswith("\n\n"), "the last frame is not closed"
    frames = Frames()
    for frame in text[:-2].split("\n\n"):
        assert "\n" not in frame, f"a frame of several lines: {frame!r}"
        assert not frames.done, f"after [DONE]: {frame!r}"
        if frame.startswith(":"):
            frames.comments += 1
        elif frame == "data: [DONE]":
            frames.done = True
        else:
            assert frame.startswith("data: "), frame
            frames.data.append(json.loads(frame.removeprefix("data: ")))
    return frames


def generating(n_sequences: int) -> Callable[[list[Piece]], bool]:
    """For a Gate: a batch in which so many sequences decode a token of their own, not their first."""
    return lambda pieces: [len(piece.tokens) for piece in pieces if piece.start > 5].count(1) == n_sequences


@asynccontextmanager
async def served(
    backend: ScriptedBackend | None = None,
    *,
    scheduler: SchedulerOptions | None = None,
    chat: ChatOptions | None = None,
    model_path: str = "",
    slot_folder: str = "",
    **options: Any,
) -> AsyncIterator[Served]:
    """`options` are HttpOptions; the model is called "tiny" unless they say otherwise. `slot_folder` needs the
    `model_path` of a file that is there. The reply repeats the prompt."""
    if backend is None:
        backend = ScriptedBackend(reply=lambda prompt: f"<{prompt}>")
    if backend.chat_template is None:
        backend.chat_template = CONCAT
    http_options = HttpOptions(**{"model_names": ("tiny", "alias")} | options)
    names = [key.name for key in http_options.api_keys]
    disk = DiskOptions(slot_folder=slot_folder)
    async with scripted_client(
        backend, scheduler, n_owners=max(1, len(names)), model_path=model_path, disk=disk
    ) as engine:
        metrics = WatchedMetrics(names)
        service = ChatService(engine, chat or ChatOptions())
        app = create_api(service, engine, metrics, http_options, model_path=model_path)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://glmserve", timeout=20) as http:
            yield Served(http, app, engine, backend, metrics)


async def assert_idle(engine: EngineClient) -> None:
    """No job is open and every slot is idle, once the engine has taken all commands sent so far."""
    probe = engine.open(Job(engine.next_job_id(), [97], SamplingOptions(temperature=0.0), max_tokens=1))
    async for _ in probe:
        pass
    assert not engine.jobs
    assert engine.snapshot is not None
    assert [slot.state for slot in engine.snapshot.slots] == [SlotState.IDLE] * len(engine.snapshot.slots)
    assert engine.snapshot.n_waiting == 0


@asynccontextmanager
async def listening(
    app: ASGIApp, protocol: Literal["h11", "httptools"] = "httptools"
) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """Serve `app` on a free loopback port. Yields its base URL."""
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    loop = asyncio.create_task(server.main_loop())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        await loop
        await server.shutdown()
