"""An OpenAI-compatible server that answers what a test says, and remembers what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Body = dict[str, Any]


def chunk(text: str | None = None, **extra: object) -> bytes:
    delta = {} if text is None else {"content": text}
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}], **extra}).encode() + b"\n\n"


def whole(body: Body) -> list[bytes]:
    """As many pieces as tokens were asked for, framed as a well-behaved server does."""
    n_tokens = body["max_tokens"]
    usage = {"prompt_tokens": 30, "completion_tokens": n_tokens, "prompt_tokens_details": {"cached_tokens": 10}}
    role = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": null}}]}\n\n'
    end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    return [role, b": keep-alive\n\n", *(chunk("w ") for _ in range(n_tokens)), end, b"data: [DONE]\n\n"]


@dataclass
class ScriptedServer:
    answer: Callable[[Body], list[bytes]] = whole
    status: int = 200
    models: tuple[str, ...] = ("the-model", "another")
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    n_at_once: int = 0
    most_at_once: int = 0

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.status != 200:
            return web.json_response({"error": {"message": "not today"}}, status=self.status)
        self.n_at_once += 1
        self.most_at_once = max(self.most_at_once, self.n_at_once)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.answer(body):
            await response.write(piece)
        self.n_at_once -= 1
        return response

    async def _list(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]}, status=self.status)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}, status=self.status)


@asynccontextmanager
async def serve(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", server._chat)
    application.router.add_get("/v1/models", server._list)
    application.router.add_get("/health", server._health)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
