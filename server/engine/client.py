"""The HTTP side's view of the engine: questions, jobs as streams of events, and what state the engine is in.

Lives on the event loop; nothing here blocks, and delivery to a slow reader never holds up another one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from server.engine.backlog import Backlog, Load
from server.engine.messages import (
    ActOnSlot,
    CallFailed,
    Cancel,
    Constraint,
    Detokenize,
    Detokenized,
    Event,
    Failed,
    FailureKind,
    Finished,
    Heartbeat,
    Job,
    JobEvent,
    LoadFailed,
    Loading,
    ModelFacts,
    Pieces,
    Planned,
    Prepare,
    Prepared,
    Question,
    Ready,
    SlotAction,
    SlotDone,
    SlotRefusal,
    SlotRefused,
    Snapshot,
    Span,
    Started,
    Stop,
    Submit,
    Tokenize,
    TokenPieces,
    Tokens,
)
from server.engine.options import EngineOptions
from server.engine.wire import Configure, EngineConnection
from server.errors import Conflict, EngineFailure, InvalidRequest, Unavailable

log = logging.getLogger(__name__)


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    state: EngineState
    phase: str = ""
    progress: float | None = None  # 0..1 while a model loads
    reason: str = ""  # why it is not ready
    retry_after_s: int = 1
    restarts: int = 0


class JobStream:
    """The events of one job, in order; ends after Finished or Failed."""

    def __init__(self, client: EngineClient, job: Job) -> None:
        self.job = job
        self.ended = False
        self.start: Started | None = None
        self._started = asyncio.Event()
        self._client = client
        self._events: deque[JobEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._interrupted: Exception | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobEvent:
        while not self._events:
            if self._interrupted is not None:
                raise self._interrupted
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    @property
    def started(self) -> bool:
        """The job has got a slot."""
        return self.start is not None

    async def until_started(self) -> None:
        await self._started.wait()

    def cancel(self) -> None:
        """End the job, wherever it is. Safe to call at any time and more than once."""
        if not self.ended:
            self._client.cancel(self.job.id)

    def push(self, event: JobEvent) -> None:
        if isinstance(event, Started):
            self.start = event
            self._started.set()
        self.ended = isinstance(event, Finished | Failed)
        self._events.append(event)
        self._wake()

    def interrupt(self, error: Exception) -> None:
        """Whoever waits for another event, now or later, gets `error` instead. The job goes on."""
        self._interrupted = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Opens jobs and asks questions over one connection at a time; the supervisor gives it a new one after a restart.

    `max_waiting`: jobs that may be open beyond the number of slots. `n_owners`: how many owners of jobs there can be;
    none of several may fill the queue alone.
    """

    def __init__(self, *, max_waiting: int, n_owners: int = 1) -> None:
        self._backlog = Backlog(max_waiting, n_owners)
        self._status = EngineStatus(EngineState.LOADING, phase="starting", progress=0.0)
        self._facts: ModelFacts | None = None
        self._snapshot: Snapshot | None = None
        self._heartbeat = Heartbeat(0.0, 0)
        self._heartbeat_at = time.monotonic()
        self._connection: EngineConnection | None = None
        self._streams: dict[int, JobStream] = {}
        self._calls: dict[int, asyncio.Future[Event]] = {}
        self._job_ids = itertools.count(1)
        self._call_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self.load_failure: str | None = None
        self.load_s = 0.0  # how long the last load took
        self.on_snapshot: Callable[[Snapshot], None] | None = None  # told of every snapshot as it arrives

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def status(self) -> EngineStatus:
        return self._status

    @status.setter
    def status(self, status: EngineStatus) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait until the status is set anew."""
        await self._changed.wait()

    @property
    def facts(self) -> ModelFacts:
        """What the loaded model is; the last one's while it is being loaded again."""
        if self._facts is None:
            raise self._unavailable()
        return self._facts

    @property
    def snapshot(self) -> Snapshot | None:
        return self._snapshot

    @property
    def jobs(self) -> Mapping[int, Job]:
        return {job_id: stream.job for job_id, stream in self._streams.items()}

    @property
    def in_step_ms(self) -> float:
        """How long the engine's current step has been running, by its last heartbeat; 0 between steps."""
        if self._heartbeat.in_step_ms == 0:
            return 0.0
        return self._heartbeat.in_step_ms + self.silent_s * 1e3

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - self._heartbeat_at

    def _unavailable(self) -> Unavailable:
        status = self._status
        what = {
            EngineState.LOADING: f"the model is loading ({status.phase})" if status.phase else "the model is loading",
            EngineState.RESTARTING: f"the engine is being restarted: {status.reason}",
            EngineState.STOPPING: "the server is stopping",
            EngineState.FAILED: f"the engine has failed: {status.reason}",
            EngineState.READY: "the engine is being restarted",
        }[status.state]
        return Unavailable(what, retry_after_s=status.retry_after_s, progress=status.progress)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def tokenize(self, spans: Sequence[Span], *, add_special: bool) -> list[int]:
        """Token ids of the joined spans. Raises Unavailable."""
        answer = await self._call(Tokenize(next(self._call_ids), list(spans), add_special))
        assert isinstance(answer, Tokens)
        return answer.tokens

    async def detokenize(self, tokens: Sequence[int], *, show_special: bool = True) -> str:
        """Raises Unavailable, and InvalidRequest for a token outside the vocabulary."""
        answer = await self._call(Detokenize(next(self._call_ids), list(tokens), show_special))
        assert isinstance(answer, Detokenized)
        return answer.text

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of single tokens. Raises Unavailable, and InvalidRequest for a token outside the vocabulary."""
        answer = await self._call(TokenPieces(next(self._call_ids), list(tokens)))
        assert isinstance(answer, Pieces)
        return answer.pieces

    async def prepare(self, constraint: Constraint) -> Prepared:
        """Have the engine compile a constraint: why it cannot be used, or what of it is not enforced."""
        answer = await self._call(Prepare(next(self._call_ids), constraint))
        assert isinstance(answer, Prepared)
        return answer

    async def act_on_slot(self, slot: int, action: SlotAction, filename: str = "") -> SlotDone:
        """Save, restore or erase what a slot holds. Raises Unavailable, InvalidRequest, Conflict for a slot at work,
        and EngineFailure where it cannot be done."""
        answer = await self._call(ActOnSlot(next(self._call_ids), slot, action, filename))
        if isinstance(answer, SlotRefused):
            match answer.reason:
                case SlotRefusal.BUSY:
                    raise Conflict(answer.message)
                case SlotRefusal.INVALID:
                    raise InvalidRequest(answer.message, param=answer.param)
                case SlotRefusal.FAILED:
                    raise EngineFailure(answer.message)
        assert isinstance(answer, SlotDone)
        return answer

    async def _call(self, question: Question | ActOnSlot) -> Event:
        connection = self._ready_connection()
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._calls[question.call_id] = future
        try:
            connection.send([question])
            answer = await future
        finally:
            self._calls.pop(question.call_id, None)
        if isinstance(answer, CallFailed):
            raise InvalidRequest(answer.message)
        return answer

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def capacity(self) -> int:
        """Jobs that one owner may have open at once: those in slots and those that may wait."""
        return self._backlog.most_of_one(self.facts.n_slots)

    @property
    def loads(self) -> Mapping[str, Load]:
        """Open jobs by owner."""
        return self._backlog.loads()

    @property
    def retry_after_s(self) -> int:
        """Seconds until a place in the queue is likely to be free."""
        return self._backlog.promise_s(self.facts.n_slots)

    def check_room(self, owner: str, n_jobs: int) -> None:
        """Raises QueueFull unless `owner` may open so many jobs more now, and Unavailable."""
        self._ready_connection()
        self._backlog.check_room(owner, n_jobs, self.facts.n_slots)

    def next_job_id(self) -> int:
        return next(self._job_ids)

    def open(self, job: Job) -> JobStream:
        """Submit a job. Raises Unavailable or QueueFull at once, before anything was sent."""
        connection = self._ready_connection()
        self._backlog.check_room(job.owner, 1, self.facts.n_slots)
        stream = JobStream(self, job)
        self._streams[job.id] = stream
        self._backlog.opened(job)
        connection.send([Submit(job)])
        return stream

    def cancel(self, job_id: int) -> None:
        if job_id in self._streams and self._connection is not None:
            self._connection.send([Cancel(job_id)])

    def stop_accepting(self) -> None:
        """Refuse new jobs and questions from now on; what is open goes on."""
        self.status = dataclasses.replace(self._status, state=EngineState.STOPPING, progress=None)

    def ask_to_stop(self, save_s: float = 0.0) -> None:
        """Ask the engine process to end, if there is one; it may take `save_s` seconds to save what is in memory."""
        if self._connection is not None:
            self._connection.send([Stop(save_s)])

    def _ready_connection(self) -> EngineConnection:
        if self._status.state is not EngineState.READY or self._connection is None:
            raise self._unavailable()
        return self._connection

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self, sock: socket.socket, options: EngineOptions) -> None:
        """Give a new engine process its options and take events from it until the connection ends. What was open then
        is the caller's to fail (`fail_all`)."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: EngineConnection(self._take), sock=sock)
        self._connection = connection
        self._heartbeat_at = time.monotonic()
        self.load_failure = None
        connection.send(Configure(options))
        try:
            await connection.closed
        finally:
            self._connection = None
            self._heartbeat = Heartbeat(0.0, 0)
            connection.close()

    def fail_all(self, reason: str, *, stopping: bool = False) -> None:
        """The engine is gone: end every job and every question. Jobs that had not started may be asked again, and when
        the server is `stopping` nobody is at fault."""
        for stream in list(self._streams.values()):
            kind = FailureKind.ENGINE if stream.started and not stopping else FailureKind.UNAVAILABLE
            self._deliver(Failed(stream.job.id, kind, reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._unavailable())

    def _take(self, event: Event) -> None:
        match event:
            case Heartbeat():
                self._heartbeat = event
                self._heartbeat_at = time.monotonic()
            case Snapshot():
                self._snapshot = event
                if self.on_snapshot is not None:
                    self.on_snapshot(event)
            case Planned(lines):
                for line in lines:
                    log.info("%s", line)
            case Loading(progress, phase):
                self.status = dataclasses.replace(self._status, progress=progress, phase=phase)
            case Ready(facts, load_ms):
                self._facts = facts
                self.load_s = load_ms / 1e3
                if self._status.state is not EngineState.STOPPING:
                    self.status = EngineStatus(EngineState.READY, restarts=self._status.restarts)
            case LoadFailed(message):
                self.load_failure = message
            case (
                Tokens(call_id)
                | Detokenized(call_id)
                | Pieces(call_id)
                | Prepared(call_id)
                | CallFailed(call_id)
                | SlotDone(call_id)
                | SlotRefused(call_id)
            ):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(event)
            case _:
                self._deliver(event)

    def _deliver(self, event: JobEvent) -> None:
        stream = self._streams.get(event.job_id)
        if stream is None:
            return
        self._backlog.note(event)
        stream.push(event)
        if stream.ended:
            del self._streams[event.job_id]
