"""Asks one OpenAI-compatible server and notes when each piece of the answer came."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import aiohttp
import msgspec

from server.ops.bench.measures import Answer
from server.ops.bench.sse import EventReader

ChatMessage = Mapping[str, str]

_DONE: Final = b"[DONE]"
_JSON: Final = {"Content-Type": "application/json"}


class BenchError(Exception):
    """The measurement cannot go on; the message says why."""


# the parts of the wire that are read; unknown fields are skipped


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Client:
    """One server. `url` is its base without /v1. Use it as an async context manager."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None, timeout_s: float = 900.0) -> None:
        self.url = url.rstrip("/")
        self._model = model
        self._chunks = msgspec.json.Decoder(_Chunk)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def is_healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def model(self) -> str:
        """The name to ask for: the one given, else the first that the server lists."""
        if self._model is None:
            async with self._session.get(f"{self.url}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise BenchError(f"{self.url}/v1/models answered {response.status}: {_start(body)}")
            models = msgspec.json.decode(body, type=_Models).data
            if not models:
                raise BenchError(f"{self.url}/v1/models lists no model; name one with --model")
            self._model = models[0].id
        return self._model

    def _chunk(self, event: bytes) -> _Chunk:
        try:
            return self._chunks.decode(event)
        except msgspec.MsgspecError as error:
            raise BenchError(f"{self.url} sent what is no chunk ({error}): {_start(event)}") from None

    async def ask(
        self,
        messages: Sequence[ChatMessage],
        n_tokens: int,
        on_delta: Callable[[int], None] | None = None,
    ) -> Answer:
        """Stream a greedy answer of exactly `n_tokens` tokens. `on_delta` gets the number of pieces so far."""
        body = {
            "model": await self.model(),
            "messages": list(messages),
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        deltas_s: list[float] = []
        text: list[str] = []
        usage = _Usage()
        sent_s = time.perf_counter()
        async with self._session.post(
            f"{self.url}/v1/chat/completions", data=msgspec.json.encode(body), headers=_JSON
        ) as response:
            if response.status != 200:
                raise BenchError(f"{self.url} answered {response.status}: {_start(await response.read())}")
            reader, done = EventReader(), False
            async for received in response.content.iter_any():
                now_s = time.perf_counter()
                for event in reader.feed(received):
                    if event == _DONE:
                        done = True
                        continue
                    chunk = self._chunk(event)
                    if chunk.error is not None:
                        raise BenchError(f"{self.url} broke a stream off: {_start(msgspec.json.encode(chunk.error))}")
                    usage = chunk.usage or usage
                    piece = "".join(
                        (choice.delta.reasoning_content or "") + (choice.delta.content or "")
                        for choice in chunk.choices
                    )
                    if piece:
                        deltas_s.append(now_s)
                        text.append(piece)
                        if on_delta is not None:
                            on_delta(len(deltas_s))
        if not done:
            raise BenchError(f"{self.url} ended a stream without [DONE]")
        details = usage.prompt_tokens_details
        return Answer(
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            deltas_s=tuple(deltas_s),
            n_prompt=usage.prompt_tokens,
            n_cached=(details.cached_tokens or 0) if details else 0,
            n_generated=usage.completion_tokens or len(deltas_s),
            text="".join(text),
        )


def _start(body: bytes) -> str:
    return body[:300].decode(errors="replace")
