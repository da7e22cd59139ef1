"""How long a request may wait, stand still and live. Limits are the server's; the messages name their settings."""

from __future__ import annotations

import asyncio
import math

from server.api.errors import TimedOut
from server.api.options import HttpOptions
from server.engine.client import EngineClient
from server.errors import QueueTimeout
from server.generation import Generation, GenerationEvent


class Deadlines:
    """Watches one generation. Times are seconds of the event loop's clock."""

    def __init__(self, generation: Generation, engine: EngineClient, options: HttpOptions) -> None:
        self._generation = generation
        self._engine = engine
        self._options = options
        self._began = self._alive = asyncio.get_running_loop().time()
        self._progress_seen = self._progress()

    async def next_event(self) -> GenerationEvent:
        """The next event of the generation, or StopAsyncIteration at its end. Raises TimedOut or Unavailable when a
        limit is passed first."""
        while True:
            when = min(self._queue_deadline, self._still_deadline, self._life_deadline)
            try:
                async with asyncio.timeout_at(when if math.isfinite(when) else None):
                    event = await anext(self._generation)
            except TimeoutError:
                self._check()
                continue
            self._alive = asyncio.get_running_loop().time()
            return event

    def _check(self) -> None:
        """Raises what ends the request, if a limit is passed. Progress of a long prompt is a sign of life, although it
        yields no event."""
        now = asyncio.get_running_loop().time()
        progress = self._progress()
        # Waiting in the queue is no stand-still; it has a limit of its own.
        if progress != self._progress_seen or self._generation.waits_in_queue:
            self._progress_seen = progress
            self._alive = now
        options = self._options
        if now >= self._life_deadline:
            raise TimedOut(f"the request took longer than {options.request_limit_s:g} s (--request-limit)")
        if now >= self._queue_deadline:
            raise QueueTimeout(
                f"no slot became free within {options.queue_timeout_s:g} s (--queue-timeout)",
                retry_after_s=self._engine.retry_after_s,
            )
        if now >= self._still_deadline:
            raise TimedOut(f"the engine made no progress with the request for {options.timeout_s:g} s (--timeout)")

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
