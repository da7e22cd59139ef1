"""A request's way through the server, without HTTP: conversation → prompt → jobs → events → deltas. Read this first.

`ChatService.open_chat` and `open_completion` do all that can fail before an answer begins (render, tokenise, check the
length, take a place in the queue) and return a `Generation` (`generation.py`): an async iterator of what happens to its
choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from server.chat.forms import AnswerForm
from server.chat.messages import Conversation, Prompt, PromptSpan
from server.chat.options import ChatOptions
from server.chat.plain import PlainDialect
from server.chat.template import ChatTemplate
from server.chat.turn import TurnReader
from server.chat.voice import Speaker, Voice, find_voice
from server.chat.volatile import without_volatile_lines
from server.engine.client import EngineClient
from server.engine.messages import (
    Job,
    ModelFacts,
    SamplingOptions,
    Span,
)
from server.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    NotSupported,
)
from server.generation import Choice, Generation
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
