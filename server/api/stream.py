"""Sends an answer, streamed or whole, and notices when its client leaves.

A handler that just waits is not stopped when the connection ends, and a response that streams notices it only when it
writes. So `receive()` is watched here all the time, and leaving, by whatever way, closes the generation: its jobs are
cancelled at once, queued, reading or generating.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api import explain
from server.api.context import Api, Notes, api_of, notes_of
from server.api.deadlines import Deadlines
from server.api.errors import CLIENT_LEFT, error_frame, internal_error
from server.api.render.parts import Writer, finish_reason
from server.errors import GlmserveError
from server.generation import ChoiceEnd, ChoiceText, Generation, GenerationEvent, collect

T = TypeVar("T")

WARNING_HEADER = "X-Constraint-Warning"
MOST_WARNING_CHARS = 2000

# A grammar is checked by the engine. For so long the headers of a stream wait for its word, so that a wrong one is a
# plain 400.
GRAMMAR_CHECK_S = 2.0
# Where a request may not wait longer for a slot than a stream may be silent, the headers wait as well, so that the end
# of the wait is a plain 503. This is how long a stream may be silent that asks for no pings.
QUIET_S = 30.0


async def answer(
    request: Request,
    open_generation: Callable[[], Awaitable[Generation]],
    writer_of: Callable[[Generation], Writer],
    *,
    streams: bool,
    ping_interval_s: float | None = None,
) -> Response:
    """Open a generation and answer with what it yields. Raises what opening raises, and for whole answers what the
    generation raises. `ping_interval_s` replaces the server's; 0: no pings."""
    api, notes = api_of(request), notes_of(request.scope)
    notes.stream = streams

    feeds: list[Feed] = []  # closed here, unless a stream does it

    async def opened() -> Feed:
        notes.generation = await open_generation()
        feeds.append(Feed(notes.generation, api, notes))
        return feeds[0]

    async def whole() -> bytes:
        feed = await opened()
        generation = feed.generation
        return writer_of(generation).whole(await collect(feed, len(generation.choices)))

    try:
        if not streams:
            body = await unless_client_leaves(request, whole())
            return Response(body, headers=_own_headers(request, notes), media_type="application/json")
        feed = await unless_client_leaves(request, opened())
        ping = api.options.ping_interval_s if ping_interval_s is None else ping_interval_s
        queue_timeout_s = api.options.queue_timeout_s
        if feed.generation.choices[0].stream.job.sampling.grammar is not None:
            await unless_client_leaves(request, feed.look_ahead(GRAMMAR_CHECK_S))
        elif queue_timeout_s is not None and queue_timeout_s <= (ping or QUIET_S):
            await unless_client_leaves(request, feed.look_ahead(queue_timeout_s + 1.0, until_started=True))
        elif explain.asks(request):
            await unless_client_leaves(request, feed.look_ahead(ping or QUIET_S, until_started=True))
        response = EventStream(feed, writer_of(feed.generation), api, notes, ping or 0)
        response.headers.update(_own_headers(request, notes))
        feeds.clear()
        return response
    except ClientDisconnect:
        notes.disconnected = True
        return Response(status_code=CLIENT_LEFT)
    finally:
        for feed in feeds:
            feed.close()
            _log_miss(api, notes)


def _log_miss(api: Api, notes: Notes) -> None:
    if api.options.log_cache_misses:
        explain.log_miss(notes)


def _own_headers(request: Request, notes: Notes) -> dict[str, str]:
    """What is told about the answer: what was asked for and is not enforced; why so much of the prompt was read."""
    headers: dict[str, str] = {}
    if notes.generation is not None and notes.generation.warnings:
        headers[WARNING_HEADER] = _printable("; ".join(notes.generation.warnings))[:MOST_WARNING_CHARS]
    if notes.generation is not None and explain.asks(request):
        headers[explain.HEADER] = explain.header_value(notes.generation)
    return headers


def _printable(text: str) -> str:
    ascii_text = text.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(char if char.isprintable() else " " for char in ascii_text)


async def unless_client_leaves(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first (raises ClientDisconnect then). The body
    of the request must have been read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_leaves(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Feed:
    """The events of a generation as long as the server's limits allow, noted for the log and the metrics."""

    def __init__(self, generation: Generation, api: Api, notes: Notes) -> None:
        self.generation = generation
        self._deadlines = Deadlines(generation, api.engine, api.options)
        self._metrics = api.metrics
        self._notes = notes
        self._last_text_at: dict[int, float] = {}
        self._ahead: asyncio.Task[GenerationEvent] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return await ahead
        event = await self._deadlines.next_event()
        self._note(event)
        return event

    async def look_ahead(self, timeout_s: float, *, until_started: bool = False) -> None:
        """Wait for the first event, or with `until_started` for a slot, but not for long. Raises what ends the
        generation before it."""

        async def first() -> GenerationEvent:
            return await anext(self)

        ahead = asyncio.ensure_future(first())
        waits: list[asyncio.Future[Any]] = [ahead]
        if until_started:
            waits.append(asyncio.ensure_future(self._started()))
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            ahead.cancel()
            raise
        finally:
            for wait in waits[1:]:
                wait.cancel()
        if ahead.done():
            ahead.result()
        self._ahead = ahead

    async def _started(self) -> None:
        await self.generation.choices[0].stream.until_started()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        self._deadlines.close()
        self.generation.close()

    def _note(self, event: GenerationEvent) -> None:
        match event:
            case ChoiceText(choice):
                now = time.perf_counter()
                if self._notes.first_text_at is None:
                    self._notes.first_text_at = now
                before = self._last_text_at.get(choice)
                if before is not None:
                    self._metrics.gap((now - before) * 1e3)
                self._last_text_at[choice] = now
            case ChoiceEnd(choice):
                has_calls = self.generation.choices[choice].has_tool_calls
                self._notes.finish_reasons.append(finish_reason(event.reason, has_tool_calls=has_calls))


class EventStream(EventSourceResponse):
    """An event stream whose generation is closed when it ends, by whatever way: sent to the end, client gone, client
    that takes nothing more, or server stopped."""

    def __init__(self, feed: Feed, writer: Writer, api: Api, notes: Notes, ping_interval_s: float) -> None:
        super().__init__(
            self._frames(feed, writer),
            headers={"Cache-Control": "no-cache"},  # X-Accel-Buffering: no comes from the base
            ping=ping_interval_s,
            ping_message_factory=lambda: ServerSentEvent(comment="", sep="\n"),
            sep="\n",
            # The base would end streams as soon as the server is told to stop; ours may finish within its grace.
            shutdown_grace_period=math.inf,
        )
        self._feed = feed
        self._api = api
        self._notes = notes
        self._complete = False
        self._sending_since: float | None = None  # by the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._api.metrics.open_stream(), self._send_limit() as limit:
                await super().__call__(scope, receive, send)
            if limit.cancelled_caught:
                self._notes.error_code = "send_timeout"
        finally:
            self._notes.disconnected = not self._complete
            self._feed.close()
            _log_miss(self._api, self._notes)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """The base would put a cancel scope and a timer around every token; `_send_limit` is one for them all."""
        first = self._sending_since is None  # a ping may go beside a token
        if first:
            self._sending_since = asyncio.get_running_loop().time()
        await send(message)
        if first:
            self._sending_since = None

    @contextmanager
    def _send_limit(self) -> Iterator[anyio.CancelScope]:
        """A scope that is cancelled when the client takes nothing for `timeout_s`."""
        loop, timeout_s = asyncio.get_running_loop(), self._api.options.timeout_s

        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            since = loop.time() if self._sending_since is None else self._sending_since
            if loop.time() >= since + timeout_s:
                scope.cancel()
            else:
                timer = loop.call_at(since + timeout_s, look)

        if timeout_s > 0:
            timer = loop.call_later(timeout_s, look)
        try:
            with anyio.CancelScope() as scope:
                yield scope
        finally:
            if timer is not None:
                timer.cancel()

    async def _frames(self, feed: Feed, writer: Writer) -> AsyncIterator[bytes]:
        """An error that comes after the 200 is the last frame of the stream."""
        try:
            async for event in feed:
                if frames := writer.chunk(event):
                    yield frames
            if frames := writer.last():
                yield frames
        except GlmserveError as error:
            self._notes.error_code = error.code
            yield error_frame(error)
        except Exception as error:  # noqa: BLE001 - a fault of ours; the client must not wait for the rest
            failure = internal_error(error, "streaming an answer")
            self._notes.error_code = failure.code
            yield error_frame(failure)
        self._complete = True
