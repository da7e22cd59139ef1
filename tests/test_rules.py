"""What a chat's jobs are held to, over an engine that compiles everything it is told to, or refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from server.chat.forms import AnswerForm, CallMode, JsonForm, ToolChoice
from server.chat.glm_generation import Generation
from server.chat.glm_templates import fallback_template
from server.chat.messages import Conversation, Message, Prompt, PromptSpan, Tool
from server.chat.options import ChatOptions
from server.chat.voice import Speaker, Voice, find_voice
from server.engine.client import EngineClient
from server.engine.messages import Constraint, Prepared, SamplingOptions, Span
from server.errors import InvalidRequest
from server.rules import MOST_KEPT, JobRules, RuleMaker


@dataclass
class StubEngine:
    """Every text is one token. Grammars with one of the words `refused` cannot be compiled."""

    refused: tuple[str, ...] = ()
    prepared: list[Constraint] = field(default_factory=list)
    facts: object = None
    tags: list[str] = field(default_factory=list)

    async def tokenize(self, spans: Sequence[Span], *, add_special: bool) -> list[int]:
        self.tags.append(spans[0].text)
        return [1000 + len(self.tags)]

    async def prepare(self, constraint: Constraint) -> Prepared:
        self.prepared.append(constraint)
        wrong = [word for word in self.refused if word in constraint.grammar]
        return Prepared(1, refusal=f"no {wrong[0]}" if wrong else "")


VOICE = find_voice(Speaker(template=fallback_template(Generation.GLM_5_2)), ChatOptions())
PROMPT = Prompt((PromptSpan("<|assistant|><think>", literal=False),), opens_in_reasoning=True)


def tool(name: str, **properties: Any) -> Tool:
    return Tool(name, {"type": "object", "properties": properties}, {})


async def rules_of(
    maker: RuleMaker,
    *tools: Tool,
    choice: ToolChoice | None = None,
    form: AnswerForm | None = None,
    sampling: SamplingOptions | None = None,
    voice: Voice = VOICE,
    prompt: Prompt = PROMPT,
) -> JobRules:
    conversation = Conversation((Message("user", "x"),), tools, tool_choice=choice or ToolChoice())
    return await maker.of_chat(voice, prompt, conversation, sampling or SamplingOptions(), form)


def maker_of(engine: StubEngine) -> RuleMaker:
    return RuleMaker(cast(EngineClient, engine))


async def test_a_free_chat_asks_the_engine_nothing() -> None:
    engine = StubEngine()
    assert await rules_of(maker_of(engine)) == JobRules()
    assert (engine.prepared, engine.tags) == ([], [])


async def test_tools_are_held_from_the_opening_tag_on() -> None:
    rules = await rules_of(maker_of(StubEngine()), tool("f"))
    assert rules.constraint is not None
    assert rules.constraint.trigger is not None
    assert rules.free_block is not None
    assert rules.free_block.is_open
    assert len(rules.free_block.enders) == 5
    forced = await rules_of(maker_of(StubEngine()), tool("f"), choice=ToolChoice(CallMode.REQUIRED))
    assert forced.constraint is not None
    assert forced.constraint.trigger is None


async def test_the_prompt_tells_where_reasoning_is() -> None:
    bare = Prompt((PromptSpan("<|assistant|>", literal=False),))
    closed = Prompt((PromptSpan("<|assistant|><think></think>", literal=False),))
    blocks = [(await rules_of(maker_of(StubEngine()), tool("f"), prompt=each)).free_block for each in (bare, closed)]
    assert [(block.is_open, block.may_open) for block in blocks if block is not None] == [(False, True), (False, False)]


async def test_grammars_and_tokens_are_kept() -> None:
    engine = StubEngine()
    maker = maker_of(engine)
    first, again = [await rules_of(maker, tool("f", a={"type": "integer"})) for _ in range(2)]
    assert first.constraint is not None
    assert again.constraint is not None
    assert first.constraint.grammar is again.constraint.grammar
    assert len(engine.tags) == len(set(engine.tags))
    other = await rules_of(maker, tool("f", a={"type": "string"}))
    assert other.constraint is not None
    assert other.constraint.grammar != first.constraint.grammar
    for i in range(MOST_KEPT):
        await rules_of(maker, tool(f"g{i}"))
    late = await rules_of(maker, tool("f", a={"type": "integer"}))
    assert late.constraint == first.constraint
    assert late.constraint is not None
    assert late.constraint.grammar is not first.constraint.grammar


async def test_the_servers_own_grammar_is_for_calls_as_well() -> None:
    sampling = SamplingOptions(grammar="root ::= x")
    assert (await rules_of(maker_of(StubEngine()), tool("f"), sampling=sampling)).constraint is None
    forced = await rules_of(maker_of(StubEngine()), tool("f"), choice=ToolChoice(CallMode.REQUIRED), sampling=sampling)
    assert forced.constraint is not None


@pytest.mark.parametrize("mode", CallMode)
async def test_a_schema_that_cannot_be_compiled_leaves_names_and_keys(mode: CallMode) -> None:
    engine = StubEngine(refused=("%json",))
    rules = await rules_of(maker_of(engine), tool("f", a={"type": "integer"}), choice=ToolChoice(mode))
    assert rules.constraint == engine.prepared[1]
    assert '"a"' in rules.constraint.grammar
    assert "only the names of tools and arguments are enforced (no %json)" in rules.warnings[0]


async def test_calls_that_nothing_can_hold() -> None:
    maker = maker_of(StubEngine(refused=("start",)))
    rules = await rules_of(maker, tool("f"))
    assert rules.constraint is None
    assert rules.warnings == ("tools: tool calls are not held to their schemas (no start)",)
    with pytest.raises(InvalidRequest, match="Field 'tool_choice': no start"):
        await rules_of(maker, tool("f"), choice=ToolChoice(CallMode.REQUIRED))


async def test_a_form_that_cannot_be_compiled() -> None:
    with pytest.raises(InvalidRequest, match="Field 'json_schema': no start") as caught:
        await rules_of(maker_of(StubEngine(refused=("start",))), form=JsonForm({}, "json_schema"))
    assert caught.value.param == "json_schema"
    with pytest.raises(InvalidRequest):
        await maker_of(StubEngine(refused=("start",))).of_text(JsonForm({}, "json_schema"))
    assert await maker_of(StubEngine()).of_text(None) == JobRules()
