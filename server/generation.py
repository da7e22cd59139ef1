"""What happens to the choices of one request, from the engine's events to what they mean, and the fold of it.

A `Generation` is an async iterator; leaving it, by any way, cancels its jobs. A non-streaming answer is `collect` over
the same events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from server.chat.messages import Delta, EndOfText, ParsedTurn, fold
from server.chat.turn import TurnReader
from server.engine.client import EngineClient, JobStream
from server.engine.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    JobEvent,
    Progress,
    Started,
    Text,
    Timings,
    TokenLogprob,
)
from server.errors import EngineFailure, GlmserveError, InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True)
class PromptProgress:
    choice: int
    n_prompt: int
    n_cached: int
    n_processed: int  # cached tokens included
    time_ms: float


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """More of one choice. `deltas` is what the text means; a parser may hold text back, so it can be empty."""

    choice: int
    text: str
    deltas: Sequence[Delta]
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    timings: Timings


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    choice: int
    deltas: Sequence[Delta]  # what the parser had held back
    reason: FinishReason
    stop_text: str
    truncated: bool
    timings: Timings


GenerationEvent = PromptProgress | ChoiceText | ChoiceEnd


@dataclass(slots=True)
class Choice:
    """One job of a generation, and what is known of it so far."""

    index: int
    stream: JobStream
    reader: TurnReader
    n_prompt: int
    started: bool = False
    slot: int | None = None
    has_tool_calls: bool = False
    n_reasoning: int = 0  # generated tokens that were reasoning
    end: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class Usage:
    n_prompt: int
    n_cached: int
    n_generated: int
    n_reasoning: int = 0  # of the generated ones


class Generation:
    """The events of one request's choices as they happen. Iterating raises the error that ended it, if one did.

    Use it as an async context manager, or call `close`: either cancels what still runs.
    """

    def __init__(
        self,
        engine: EngineClient,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        warnings: Sequence[str] = (),
    ) -> None:
        self.facts = engine.facts
        self.choices = choices
        self.is_normalized = False  # something that changes with each request was left out of the prompt
        self.prompts = prompts  # token ids, one list for each prompt; choices are grouped by prompt
        self.warnings = warnings  # what was asked for and is not enforced
        self._engine = engine
        self._merged: asyncio.Queue[tuple[Choice, JobEvent] | GlmserveError] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._cuts: deque[ChoiceEnd] = deque()  # ends that the engine did not make, to be told next

    @property
    def usage(self) -> Usage:
        """Each prompt is counted once, however many choices continue it."""
        n_choices = len(self.choices) // len(self.prompts)
        first_of_prompt = self.choices[::n_choices]
        return Usage(
            n_prompt=sum(map(len, self.prompts)),
            n_cached=sum(choice.timings.cache_n for choice in first_of_prompt),
            n_generated=sum(choice.timings.predicted_n for choice in self.choices),
            n_reasoning=sum(choice.n_reasoning for choice in self.choices),
        )

    @property
    def waits_in_queue(self) -> bool:
        """No choice has got a slot yet."""
        return not any(choice.started for choice in self.choices)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        while True:
            if self._cuts:
                return self._cuts.popleft()
            choice, event = await self._next()
            if choice.end is not None:  # it was cut; this was on its way
                continue
            if isinstance(event, Failed):
                if event.timings != Timings():  # an engine that died tells none; what was known of it stays
                    choice.timings = event.timings
                raise _error_of(event, self._engine.status.retry_after_s)
            shown = _shown(choice, event)
            if isinstance(shown, ChoiceText) and _is_over(choice):
                self._cuts.append(_cut(choice))
            if shown is not None:
                return shown

    async def _next(self) -> tuple[Choice, JobEvent]:
        if len(self.choices) == 1:  # the usual case has no use for tasks and a queue
            only = self.choices[0]
            if only.end is not None:
                raise StopAsyncIteration
            return only, await anext(only.stream)
        if all(choice.end is not None for choice in self.choices):
            raise StopAsyncIteration
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(choice)) for choice in self.choices]
        merged = await self._merged.get()
        if isinstance(merged, GlmserveError):
            raise merged
        return merged

    async def _pump(self, choice: Choice) -> None:
        async for event in choice.stream:
            self._merged.put_nowait((choice, event))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def interrupt(self, error: GlmserveError) -> None:
        """Whoever waits for the next event gets `error` instead."""
        if len(self.choices) == 1:
            self.choices[0].stream.interrupt(error)
        else:
            self._merged.put_nowait(error)

    def close(self) -> None:
        """Cancel every job that has not ended. Safe to call more than once; never waits."""
        for choice in self.choices:
            choice.stream.cancel()
        for pump in self._pumps:
            pump.cancel()


def _shown(choice: Choice, event: Started | Progress | Text | Finished) -> GenerationEvent | None:
    """One engine event as an event of the generation, with the choice brought up to date."""
    match event:
        case Text():
            choice.timings = event.timings
            deltas = choice.reader.feed(event.text, len(event.tokens))
            _note(choice)
            return ChoiceText(choice.index, event.text, deltas, event.tokens, event.logprobs, event.timings)
        case Started():
            choice.started = True
            choice.slot = event.slot
            choice.timings = Timings(cache_n=event.n_cached, queue_ms=event.queue_ms)
            return None
        case Progress():
            return PromptProgress(choice.index, event.n_prompt, event.n_cached, event.n_processed, event.time_ms)
        case Finished():
            choice.timings = event.timings
            choice.end = event.reason
            # Only an end token is the model's own end; after a stop text more was meant.
            own_end = event.reason is FinishReason.END_OF_TURN
            deltas = choice.reader.finish(EndOfText.STOP if own_end else EndOfText.LENGTH)
            _note(choice)
            return ChoiceEnd(choice.index, deltas, event.reason, event.stop_text, event.truncated, event.timings)


def _note(choice: Choice) -> None:
    choice.has_tool_calls = choice.reader.has_tool_calls
    choice.n_reasoning = choice.reader.n_reasoning


def _is_over(choice: Choice) -> bool:
    """The rest of the answer is not wanted, unless tokens are asked for whatever they are."""
    return choice.reader.is_over and not choice.stream.job.sampling.ignore_eos


def _cut(choice: Choice) -> ChoiceEnd:
    """End a choice before the engine does."""
    choice.stream.cancel()
    choice.end = FinishReason.END_OF_TURN
    deltas = choice.reader.finish(EndOfText.STOP)
    _note(choice)
    return ChoiceEnd(choice.index, deltas, choice.end, "", False, choice.timings)


def _error_of(event: Failed, retry_after_s: int) -> GlmserveError:
    match event.kind:
        case FailureKind.INVALID:
            return InvalidRequest(event.message)
        case FailureKind.CONTEXT_FULL | FailureKind.UNAVAILABLE:
            return Unavailable(event.message, retry_after_s=retry_after_s)
        case FailureKind.CANCELLED:
            return EngineFailure("the request was cancelled")
        case FailureKind.ENGINE:
            return EngineFailure(f"the engine failed while it worked on this request: {event.message}")


# ── the fold ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class ChoiceResult:
    """One whole choice."""

    end: ChoiceEnd
    turn: ParsedTurn
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]


@dataclass(slots=True)
class _Parts:
    deltas: list[Delta] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: ChoiceEnd | None = None


async def collect(events: AsyncIterable[GenerationEvent], n_choices: int) -> list[ChoiceResult]:
    """Join the events of all choices, by index. Raises what the iteration raises."""
    parts = [_Parts() for _ in range(n_choices)]
    async for event in events:
        match event:
            case ChoiceText():
                part = parts[event.choice]
                part.deltas += event.deltas
                part.texts.append(event.text)
                part.tokens += event.tokens
                part.logprobs += event.logprobs
            case ChoiceEnd():
                parts[event.choice].deltas += event.deltas
                parts[event.choice].end = event
            case PromptProgress():
                pass
    return [
        ChoiceResult(part.end, fold(part.deltas), "".join(part.texts), part.tokens, part.logprobs)
        for part in parts
        if part.end is not None
    ]
