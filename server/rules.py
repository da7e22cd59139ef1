"""What the jobs of one request are held to, in tokens of the loaded model: the form of the answer, tool calls, the
budget of the reasoning. Part of the service."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass

from server.chat.constraint import Steering, steer_text
from server.chat.forms import AnswerForm
from server.chat.messages import Conversation, Prompt
from server.chat.template import THINK_CLOSE, THINK_OPEN
from server.chat.voice import Voice
from server.engine.client import EngineClient
from server.engine.messages import BlockLimit, Constraint, FreeBlock, ModelFacts, SamplingOptions, Span
from server.errors import InvalidRequest

MOST_KEPT = 64  # grammars of requests


@dataclass(frozen=True, slots=True)
class JobRules:
    """`warnings` tell what of a schema is not enforced."""

    block_limit: BlockLimit | None = None
    free_block: FreeBlock | None = None
    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()


class RuleMaker:
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._facts: ModelFacts | None = None
        self._steerings: OrderedDict[object, Steering | None] = OrderedDict()
        self._tokens: dict[str, int | None] = {}  # of tags, in the model of these facts

    async def of_text(self, form: AnswerForm | None) -> JobRules:
        """For raw completions. Raises InvalidRequest for a form that cannot be enforced."""
        constraint, warnings = await self._constraint(steer_text(form))
        return JobRules(constraint=constraint, warnings=warnings)

    async def of_chat(
        self,
        voice: Voice,
        prompt: Prompt,
        conversation: Conversation,
        sampling: SamplingOptions,
        form: AnswerForm | None,
    ) -> JobRules:
        """Raises InvalidRequest for what cannot be enforced together, or by this model."""
        steering = await self._steering(voice, conversation, form)
        if sampling.grammar and steering is not None and steering.trigger is not None:
            steering = None  # the server's own grammar is for all of the answer, calls as well
        constraint, warnings = await self._constraint(steering)
        free_block = None
        if constraint is not None or (sampling.grammar and prompt.opens_in_reasoning):
            free_block = await self._free_block(voice, prompt)
        block_limit = await self._block_limit(voice, prompt, conversation, has_grammar=bool(sampling.grammar))
        return JobRules(block_limit, free_block, constraint, warnings)

    async def _steering(self, voice: Voice, conversation: Conversation, form: AnswerForm | None) -> Steering | None:
        """Writing the grammar of fifty tools takes as long as ten answers' chunks, and agents send the same again."""
        if form is None and not conversation.tools:
            return None
        tools = json.dumps([(tool.name, tool.parameters) for tool in conversation.tools], ensure_ascii=False)
        choice = (conversation.tool_choice, conversation.parallel_tool_calls, conversation.parse_tool_calls)
        key = (voice.dialect.name, tools, choice, repr(form))
        if key in self._steerings:
            self._steerings.move_to_end(key)
            return self._steerings[key]
        steering = await asyncio.to_thread(voice.steering, conversation, form)
        self._steerings[key] = steering
        if len(self._steerings) > MOST_KEPT:
            self._steerings.popitem(last=False)
        return steering

    # ── constraints ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _constraint(self, steering: Steering | None) -> tuple[Constraint | None, tuple[str, ...]]:
        if steering is None:
            return None, ()
        trigger = None
        if steering.trigger is not None:
            trigger = await self._token(steering.trigger)
            if trigger is None:  # nothing to wait for: this vocabulary writes the tag in several tokens
                return None, ("tool calls are not held to their schemas: this model has no tokens for their tags",)
        constraint = Constraint(steering.grammar, trigger, steering.forbidden)
        answer = await self._engine.prepare(constraint)
        if not answer.refusal:
            return constraint, (*steering.relaxed, *(f"{steering.field}: {each}" for each in answer.warnings))
        if steering.simpler is None:
            raise InvalidRequest(f"Field '{steering.field}': {answer.refusal}", param=steering.field.partition(".")[0])
        simpler = Constraint(steering.simpler, trigger, steering.forbidden)
        second = await self._engine.prepare(simpler)
        if second.refusal and trigger is not None:  # nobody asked for it
            return None, (f"{steering.field}: tool calls are not held to their schemas ({second.refusal})",)
        if second.refusal:
            raise InvalidRequest(f"Field '{steering.field}': {second.refusal}", param=steering.field)
        return simpler, (f"{steering.field}: only the names of tools and arguments are enforced ({answer.refusal})",)

    async def _free_block(self, voice: Voice, prompt: Prompt) -> FreeBlock | None:
        opener, closer = await self._think_tokens()
        if opener is None or closer is None or not (prompt.opens_in_reasoning or voice.generation is not None):
            return None
        enders = [await self._token(tag) for tag in voice.dialect.turn_tags]
        return FreeBlock(
            opener,
            closer,
            tuple(token for token in enders if token is not None),
            is_open=prompt.opens_in_reasoning,
            may_open=voice.may_open_reasoning(prompt),
        )

    # ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _block_limit(
        self, voice: Voice, prompt: Prompt, conversation: Conversation, *, has_grammar: bool
    ) -> BlockLimit | None:
        """The budget of reasoning, in tokens of this model."""
        budget = voice.budget(conversation)
        if budget is None:
            return None
        asked = conversation.thinking.budget is not None
        if has_grammar and not prompt.opens_in_reasoning:
            if asked:
                raise InvalidRequest(
                    "a reasoning budget is supported together with a grammar only where the prompt opens the reasoning",
                    param="grammar",
                )
            return None
        opener, closer = await self._think_tokens()
        if opener is None or closer is None:
            if asked:
                raise InvalidRequest("this model has no tokens for think tags, so its reasoning cannot be limited")
            return None
        n_tokens, message = budget
        ending = await self._engine.tokenize([Span(message, special=False)], add_special=False) if message else []
        return BlockLimit(n_tokens, opener, closer, [*ending, closer], is_open=prompt.opens_in_reasoning)

    async def _think_tokens(self) -> tuple[int | None, int | None]:
        return await self._token(THINK_OPEN), await self._token(THINK_CLOSE)

    async def _token(self, tag: str) -> int | None:
        """The one token of a tag; None: it takes several."""
        facts = self._engine.facts
        if self._facts is not facts:
            self._facts, self._tokens = facts, {}
        if tag not in self._tokens:
            tokens = await self._engine.tokenize([Span(tag, special=True)], add_special=False)
            self._tokens[tag] = tokens[0] if len(tokens) == 1 else None
        return self._tokens[tag]
