"""A request's way through the server, without HTTP: conversation → prompt → jobs → events → deltas. Read this first.

`ChatService.open_chat` and `open_completion` do all that can fail before an answer begins (render, tokenise, check the
length, take a place in the queue) and return a `Generation`: an async iterator of what happens to its choices. Leaving
it, by any way, cancels its jobs. A non-streaming answer is `collect` over the same events.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec

from server.chat.forms import AnswerForm
from server.chat.messages import Conversation, Delta, EndOfText, ParsedTurn, Prompt, PromptSpan, fold
from server.chat.options import ChatOptions
from server.chat.plain import PlainDialect
from server.chat.template import ChatTemplate
from server.chat.turn import TurnReader
from server.chat.voice import Speaker, Voice, find_voice
from server.chat.volatile import without_volatile_lines
from server.engine.client import EngineClient, JobStream
from server.engine.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Job,
    JobEvent,
    ModelFacts,
    Progress,
    SamplingOptions,
    Span,
    Started,
    Text,
    Timings,
    TokenLogprob,
)
from server.errors import (
    ConfigError,
    ContextTooLong,
    EngineFailure,
    GlmserveError,
    InvalidRequest,
    NotSupported,
    Unavailable,
)
from server.rules import JobRules, RuleMaker

logger = logging.getLogger(__name__)

# No vocabulary has longer tokens in any number; runs of blanks come nearest.
MOST_CHARS_PER_TOKEN = 128


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How each choice is generated. Counts are tokens; -1 max_tokens means until the context is full."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int = -1
    n: int = 1
    stop: tuple[str, ...] = ()
    n_logprobs: int | None = None
    post_sampling_probs: bool = False
    time_limit_ms: float | None = None
    cache_prompt: bool = True
    slot: int | None = None
    report_progress: bool = False
    form: AnswerForm | None = None
    text_bias: tuple[tuple[str, float], ...] = ()  # like SamplingOptions.logit_bias, for every token of a text
    owner: str = ""  # who asks; owners share the slots fairly
    owner_limit: int = 0  # jobs of the owner in slots at once; 0: no limit
    priority: int = 0  # lower goes first
    explain_cache: bool = False  # say where the prompt differs from the nearest one in the cache


# A raw prompt: pieces of text and of token ids, to be joined.
RawPrompt = tuple[str | tuple[int, ...], ...]


# ── events of a generation ───────────────────────────────────────────────────────────────────────────────────────────


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
        self._merged: asyncio.Queue[tuple[Choice, JobEvent]] = asyncio.Queue()
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
                choice.timings = event.timings
                raise _error_of(event, self._engine.status.retry_after_s)
            shown = _shown(choice, event)
            if isinstance(shown, ChoiceText) and _is_over(choice):
                self._cuts.append(_cut(choice))
            if shown is not None:
                return shown

    async def _next(self) -> tuple[Choice, JobEvent]:
        if all(choice.end is not None for choice in self.choices):
            raise StopAsyncIteration
        if len(self.choices) == 1:  # the usual case has no use for tasks and a queue
            only = self.choices[0]
            return only, await anext(only.stream)
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(choice)) for choice in self.choices]
        return await self._merged.get()

    async def _pump(self, choice: Choice) -> None:
        async for event in choice.stream:
            self._merged.put_nowait((choice, event))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

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


# ── the service ──────────────────────────────────────────────────────────────────────────────────────────────────────


class ChatService:
    """Text in, events out."""

    def __init__(self, engine: EngineClient, options: ChatOptions) -> None:
        self._engine = engine
        self._options = options
        self._rules = RuleMaker(engine)
        self._facts: ModelFacts | None = None
        self._voice: Voice | None = None
        self._told_of_volatile = False

    def prepare(self) -> ChatTemplate:
        """Choose template and dialect for the loaded model. Called when the model is ready, so that a broken template
        is told at once. Raises Unavailable before that, and ConfigError when the template is no valid Jinja."""
        return self._speak().template

    @property
    def template_source(self) -> str:
        """What the template is, usable or not. Raises Unavailable while no model is loaded."""
        facts = self._engine.facts
        try:
            return self._speak().template.source
        except ConfigError:
            return self._options.template or facts.chat_template or ""

    def render(self, conversation: Conversation) -> Prompt:
        """Raises InvalidRequest when the template refuses, NotSupported when there is no usable template."""
        return self._chat_voice().render(self._stable(conversation))

    async def count(self, conversation: Conversation) -> int:
        """Prompt tokens of a conversation, exactly as `open_chat` would count them."""
        voice = self._chat_voice()
        return len(await self._tokenize(voice, voice.render(self._stable(conversation))))

    async def open_chat(self, conversation: Conversation, options: GenerationOptions) -> Generation:
        """Raises ContextTooLong, InvalidRequest, QueueFull or Unavailable before anything runs."""
        voice = self._chat_voice()
        stable = self._stable(conversation)
        prompt = voice.render(stable)
        tokens = await self._tokenize(voice, prompt)
        generation = await self._open(
            [tokens],
            options,
            lambda: voice.reader(prompt, conversation),
            show_special=voice.dialect.shows_special_tokens,
            rules=await self._rules.of_chat(voice, prompt, conversation, options.sampling, options.form),
        )
        generation.is_normalized = stable is not conversation
        return generation

    async def open_completion(self, prompts: Sequence[RawPrompt], options: GenerationOptions) -> Generation:
        """`options.n` choices for each prompt. Raises what `open_chat` raises."""
        for prompt in prompts:
            self._refuse_hopeless(sum(len(piece) for piece in prompt if isinstance(piece, str)))
        tokens = [await self.tokenize_raw(prompt, add_special=True, parse_special=True) for prompt in prompts]
        rules = await self._rules.of_text(options.form)
        return await self._open(tokens, options, _plain_reader, show_special=False, rules=rules)

    async def tokenize_raw(self, prompt: RawPrompt, *, add_special: bool, parse_special: bool) -> list[int]:
        """Only a first piece of text is given the vocabulary's BOS. Raises InvalidRequest for an unknown token id."""
        tokens: list[int] = []
        for i, piece in enumerate(prompt):
            if isinstance(piece, str):
                span = Span(piece, special=parse_special)
                tokens += await self._engine.tokenize([span], add_special=add_special and i == 0)
            else:
                check_tokens(piece, self._engine.facts)
                tokens += piece
        return tokens

    def _stable(self, conversation: Conversation) -> Conversation:
        """Without what would make the cache useless."""
        if not self._options.normalize:
            return conversation
        stable = without_volatile_lines(conversation)
        if stable is not conversation and not self._told_of_volatile:
            self._told_of_volatile = True
            logger.info(
                "clients send a billing line (x-anthropic-billing-header) that changes with each request; it is left "
                "out of prompts, so that they can be taken from the cache (--no-normalize-prompts keeps it)"
            )
        return stable

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _tokenize(self, voice: Voice, prompt: Prompt) -> list[int]:
        self._refuse_hopeless(sum(len(span.text) for span in prompt.spans))
        spans = [_span(span) for span in prompt.spans]
        return await self._engine.tokenize(spans, add_special=not voice.begins_itself(prompt))

    def _refuse_hopeless(self, n_chars: int) -> None:
        """Megabytes that cannot fit are not worth the seconds it takes to count their tokens."""
        n_ctx = self._engine.facts.n_ctx_seq
        if n_chars > n_ctx * MOST_CHARS_PER_TOKEN:
            raise ContextTooLong(n_chars // MOST_CHARS_PER_TOKEN, n_ctx, at_least=True)

    async def _open(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions,
        reader_of_choice: Callable[[], TurnReader],
        *,
        show_special: bool,
        rules: JobRules,
    ) -> Generation:
        facts = self._engine.facts
        n_jobs, capacity = len(prompts) * options.n, self._engine.capacity
        if n_jobs > capacity:
            raise InvalidRequest(
                f"the request asks for {n_jobs} answers, but {capacity} are the most that this server takes at once "
                f"(--parallel and --max-queue together); send fewer prompts or a smaller n"
            )
        for tokens in prompts:
            if not tokens:
                raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
            if len(tokens) >= facts.n_ctx_seq:
                raise ContextTooLong(len(tokens), facts.n_ctx_seq)
        if options.slot is not None and options.slot >= facts.n_slots:
            raise InvalidRequest(
                f"there is no slot {options.slot}; slots are 0 to {facts.n_slots - 1}", param="id_slot"
            )
        sampling = await self._with_bias(options, facts)
        if rules.constraint is not None and sampling.grammar is not None:  # the server's, which the request's replaces
            sampling = msgspec.structs.replace(sampling, grammar=None)
        self._engine.check_room(options.owner, n_jobs)
        choices: list[Choice] = []
        try:
            for tokens in prompts:
                first: int | None = None
                for _ in range(options.n):
                    job = self._job(tokens, sampling, options, first, show_special=show_special, rules=rules)
                    first = first if first is not None else job.id
                    choices.append(Choice(len(choices), self._engine.open(job), reader_of_choice(), len(tokens)))
        except BaseException:
            for choice in choices:
                choice.stream.cancel()
            raise
        return Generation(self._engine, choices, prompts, rules.warnings)

    def _job(
        self,
        tokens: list[int],
        sampling: SamplingOptions,
        options: GenerationOptions,
        first: int | None,
        *,
        show_special: bool,
        rules: JobRules,
    ) -> Job:
        return Job(
            id=self._engine.next_job_id(),
            tokens=tokens,
            sampling=sampling,
            max_tokens=options.max_tokens,
            stop=options.stop,
            n_logprobs=options.n_logprobs,
            post_sampling_probs=options.post_sampling_probs,
            time_limit_ms=options.time_limit_ms,
            cache_prompt=options.cache_prompt,
            slot=options.slot,
            same_prompt_as=first,
            report_progress=options.report_progress,
            show_special=show_special,
            block_limit=rules.block_limit,
            constraint=rules.constraint,
            free_block=rules.free_block,
            owner=options.owner,
            owner_limit=options.owner_limit,
            priority=options.priority,
            explain_cache=options.explain_cache and first is None,
        )

    async def _with_bias(self, options: GenerationOptions, facts: ModelFacts) -> SamplingOptions:
        sampling = options.sampling
        for token, _ in sampling.logit_bias:
            if not 0 <= token < facts.n_vocab:
                raise InvalidRequest(
                    f"token {token} is not in the vocabulary, whose ids are 0 to {facts.n_vocab - 1}",
                    param="logit_bias",
                )
        if not options.text_bias:
            return sampling
        bias = list(sampling.logit_bias)
        for text, value in options.text_bias:
            tokens = await self._engine.tokenize([Span(text, special=False)], add_special=False)
            bias += [(token, value) for token in tokens]
        return msgspec.structs.replace(sampling, logit_bias=tuple(bias))

    def _speak(self) -> Voice:
        facts = self._engine.facts
        if self._voice is None or self._facts is not facts:
            speaker = Speaker(
                architecture=facts.architecture,
                template=facts.chat_template,
                bos_text=facts.bos_text,
                eos_text=facts.eos_text,
                control_texts=facts.control_texts,
            )
            self._voice, self._facts = find_voice(speaker, self._options), facts
        return self._voice

    def _chat_voice(self) -> Voice:
        try:
            return self._speak()
        except ConfigError as error:
            raise NotSupported(f"{error.message}; start the server with a working --chat-template-file") from error


def check_tokens(tokens: Sequence[int], facts: ModelFacts) -> None:
    """Raises InvalidRequest for a token that is not in the vocabulary."""
    for token in tokens:
        if not 0 <= token < facts.n_vocab:
            raise InvalidRequest(f"token {token} is not in the vocabulary, whose ids are 0 to {facts.n_vocab - 1}")


def _plain_reader() -> TurnReader:
    return TurnReader(PlainDialect().parser(Prompt(()), ()))


def _span(span: PromptSpan) -> Span:
    return Span(span.text, special=not span.literal)
