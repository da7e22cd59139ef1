"""How long a request may wait, stand still and live. Limits are the server's; the messages name their settings.

One timer looks after a request, however many tokens it has: what happens for each of them only notes the time.
"""

from __future__ import annotations

import asyncio
import math

from server.api.errors import TimedOut
from server.api.options import HttpOptions
from server.engine.client import EngineClient
from server.errors import GlmserveError, QueueTimeout
from server.generation import Generation, GenerationEvent


class Deadlines:
    """Watches one generation from now until `close`. Times are seconds of the event loop's clock."""

    def __init__(self, generation: Generation, engine: EngineClient, options: HttpOptions) -> None:
        self._generation = generation
        self._engine = engine
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._began = self._alive = self._loop.time()
        self._awaited = False  # somebody waits for the next event
        self._progress_seen = self._progress()
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    async def next_event(self) -> GenerationEvent:
        """The next event of the generation, or StopAsyncIteration at its end. Raises TimedOut or QueueTimeout when a
        limit is passed first."""
        self._awaited = True
        event = await anext(self._generation)
        self._awaited = False
        self._alive = self._loop.time()
        return event

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        when = min(self._queue_deadline, self._still_deadline, self._life_deadline)
        self._timer = self._loop.call_at(when, self._look) if math.isfinite(when) else None

    def _look(self) -> None:
        """A deadline has come, if it has not moved since."""
        now = self._loop.time()
        progress = self._progress()
        # Reading a long prompt is a sign of life, although it yields no event. Waiting in the queue is no stand-still,
        # nor is a client that takes nothing: each has a limit of its own.
        if progress != self._progress_seen or self._generation.waits_in_queue or not self._awaited:
            self._progress_seen = progress
            self._alive = now
        error = self._passed(now)
        if error is None:
            self._wait()
        else:
            self._generation.interrupt(error)

    def _passed(self, now: float) -> GlmserveError | None:
        options = self._options
        if now >= self._life_deadline:
            return TimedOut(f"the request took longer than {options.request_limit_s:g} s (--request-limit)")
        if now >= self._queue_deadline:
            return QueueTimeout(
                f"no slot became free within {options.queue_timeout_s:g} s (--queue-timeout)",
                retry_after_s=self._engine.retry_after_s,
            )
        if now >= self._still_deadline:
            return TimedOut(f"the engine made no progress with the request for {options.timeout_s:g} s (--timeout)")
        return None

    @property
    def _life_deadline(self) -> float:
        return math.inf if self._options.request_limit_s is None else self._began + self._options.request_limit_s

    @property
    def _queue_deadline(self) -> float:
        if self._options.queue_timeout_s is None or not self._generation.waits_in_queue:
            return math.inf
        return self._began + self._options.queue_timeout_s

    @property
    def _still_deadline(self) -> float:
        return self._alive + self._options.timeout_s if self._options.timeout_s > 0 else math.inf

    def _progress(self) -> tuple[int, ...]:
        """Changes whenever the engine reads more of a prompt or generates more for one of the choices."""
        snapshot = self._engine.snapshot
        if snapshot is None:
            return ()
        jobs = {choice.stream.job.id for choice in self._generation.choices}
        return tuple(slot.n_processed + slot.n_decoded for slot in snapshot.slots if slot.job_id in jobs)
