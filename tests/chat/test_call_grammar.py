"""Calls written by chance under their grammar are read back by the parser as calls that fit their schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from server.chat.constraint import Steering, steer_chat
from server.chat.forms import CallMode, ToolChoice
from server.chat.glm import GlmDialect, GlmParser
from server.chat.glm_generation import Generation
from server.chat.messages import Conversation, EndOfText, Message, ParsedTurn, Tool, fold
from server.engine.messages import Constraint
from tests.support.grammar_walk import Walker
from tests.support.token_tables import GLM_ENDS, GLM_TAGS, glm_table, synthetic_words
from tests.support.tool_schemas import SchemaMaker

GLM = GlmDialect(Generation.GLM_5_2)


def tool(name: str, parameters: Any) -> Tool:
    return Tool(name, parameters, {})


def forced(tools: Sequence[Tool], name: str | None = None, *, parallel: bool = True) -> Steering:
    names = None if name is None else frozenset({name})
    conversation = Conversation(
        (Message("user", "x"),),
        tuple(tools),
        tool_choice=ToolChoice(CallMode.REQUIRED, names, only_one=name is not None),
        parallel_tool_calls=parallel,
    )
    steering = steer_chat(conversation, None, GLM, tool_grammar=True)
    assert steering is not None
    return steering


def constraint_of(steering: Steering) -> Constraint:
    return Constraint(steering.grammar, None, steering.forbidden)


def parsed(text: str, tools: Sequence[Tool]) -> ParsedTurn:
    parser = GlmParser(tools, start_in_reasoning=False, generation=Generation.GLM_5_2)
    return fold([*parser.feed(text), *parser.finish(EndOfText.STOP)])


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(glm_table(synthetic_words(1000)))


def problems(walker: Walker, schema: Any, seed: int) -> list[str]:
    """What is wrong with one call by chance."""
    tools = [tool("f", schema), tool("f_other", {})]
    text = walker.walk(constraint_of(forced(tools, "f")), seed)
    turn = parsed(text, tools)
    if [call.name for call in turn.tool_calls] != ["f"] or turn.content or turn.reasoning:
        return [f"{text!r} was read as {turn}"]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    return [f"{text!r}: {e.message}" for e in validator.iter_errors(json.loads(turn.tool_calls[0].arguments))]


@pytest.mark.parametrize("seed", range(150))
def test_calls_by_chance_fit_schemas_by_chance(walker: Walker, seed: int) -> None:
    schema = SchemaMaker(seed).parameters()
    steering = forced([tool("f", schema)], "f")
    assert steering.relaxed == ()
    assert walker.compiler.prepare(constraint_of(steering)).warnings == ()
    assert problems(walker, schema, seed) == []


NEED = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 5}, "minProperties": 1},
        {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
        NEED | {"minProperties": 1, "maxProperties": 2},
        NEED | {"dependentRequired": {"a": ["b"], "b": ["c"]}},
        NEED | {"dependentRequired": {"a": ["d"]}, "additionalProperties": False},
        NEED | {"required": ["d"]},
        NEED | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        NEED | {"anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
        NEED | {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": ["null", "integer"], "maximum": 3}}}]},
        {"$ref": "#/$defs/arguments", "$defs": {"arguments": NEED | {"required": ["c"]}}},
        {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(70)}, "required": ["k3", "k69"]},
        {"type": "object", "properties": {"x": False, "y": {"const": "null"}}, "required": ["y"]},
        {"type": "object", "properties": {"x": {"oneOf": [{"pattern": "^a", "maxLength": 3}, {"enum": ["b", "ab"]}]}}},
        {"type": "object", "properties": {"x": {"minimum": 5, "maxLength": 3, "maxItems": 1, "maxProperties": 1}}},
    ],
)
def test_roots_of_every_kind(walker: Walker, schema: Any) -> None:
    for seed in range(8):
        assert problems(walker, schema, seed) == []


TEXTS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "texts": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "any": {"type": ["string", "object", "null"], "minProperties": 0},
    },
    "required": ["text", "texts", "any"],
}


def test_values_cannot_spell_their_own_end() -> None:
    """Every tag is an ordinary token here as well, whole and in parts, and is chosen as often as any letter."""
    tags = [
        *GLM_TAGS,
        *GLM_ENDS,
        "</",
        "<",
        ">",
        "><",
        "arg_key",
        "arg_value>",
        "tool_call>",
        "text",
        "any",
        "\\n",
        "\\",
    ]
    walker = Walker(glm_table([tag.encode() for tag in tags] * 3))
    tools = [tool("f", TEXTS)]
    constraint = constraint_of(forced(tools, "f"))
    for seed in range(150):
        text = walker.walk(constraint, seed)
        turn = parsed(text, tools)
        assert len(turn.tool_calls) == 1, text
        assert turn.content == "", text
        arguments = json.loads(turn.tool_calls[0].arguments)
        assert jsonschema_rs.is_valid(TEXTS, arguments), text
        assert f"<arg_value>{arguments['text']}</arg_value>" in text


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
)
OTHER = tool("get", {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}})


def call(*pairs: tuple[str, str], name: str = "get_weather", gap: str = "") -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in pairs)
    return f"<tool_call>{name}{gap}{inner}</tool_call>"


def accepts(walker: Walker, constraint: Constraint, text: str) -> bool:
    """The whole text, tags as their tokens unless a zero byte stands before them, and the end may follow it."""
    table = walker.table
    guide = walker.guide(constraint)
    while text:
        tag = next((tag for tag in GLM_TAGS if text.startswith(tag)), None)
        text = text.removeprefix("\0")
        part = text[0] if tag is None else tag
        for token in part.encode() if tag is None else [table.pieces.index(part.encode())]:
            if guide.refuses(token):
                return False
            guide.note(token)
        text = text[len(part) :]
    return not guide.refuses(min(table.end_tokens))


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (call(("city", "Oslo")), True),
        (call(("city", "Oslo"), gap="\n"), True),
        ("\n" + call(("city", "Oslo")), True),
        (call(("days", "3"), ("city", "Oslo"), ("unit", "C")), True),
        (call(("city", "Oslo")) + "\n" + call(("city", "Rom")), True),
        (call(("city", "Oslo")) + call(("a", "x"), name="get"), True),
        (call(("city", "The \0</tool_call> tag")), True),
        (call(("city", "")), True),
        (call(("city", "Oslo"), ("note", "null")), True),
        (call(("city", "Oslo"), ("note", "nothing")), True),
        (call(("city", "A \0</arg_value>\0</tool_call> tag")), False),
        (call(name="get"), True),
        (call(("a", "7"), name="get"), True),
        (call(), False),  # the city is required
        (call(("unit", "C")), False),
        (call(("city", "Oslo"), ("city", "Rom")), False),
        (call(("city", "Oslo"), ("town", "Rom")), False),
        (call(("city", "Oslo"), ("unit", "K")), False),
        (call(("city", "Oslo"), ("days", "three")), False),
        (call(("city", "Oslo"), ("days", "3.5")), False),
        (call(("city", "Oslo"), name="get_weathe"), False),
        (call(("city", "Oslo"), name="weather"), False),
        ("Sure. " + call(("city", "Oslo")), False),
        (call(("city", "Oslo")) + " Done.", False),
        ("", False),
        (call(("city", "Oslo")).removesuffix("</tool_call>"), False),
        (call(("city", "Oslo")).replace("</arg_value>", ""), False),
        (call(("city", "Oslo")).replace("<arg_value>", ""), False),
    ],
)
def test_forced_calls(walker: Walker, text: str, is_right: bool) -> None:
    assert accepts(walker, constraint_of(forced([WEATHER, OTHER])), text) is is_right


def test_one_call_only_where_that_was_asked(walker: Walker) -> None:
    two = call(("city", "Oslo")) + call(("city", "Rom"))
    assert not accepts(walker, constraint_of(forced([WEATHER, OTHER], parallel=False)), two)
    assert not accepts(walker, constraint_of(forced([WEATHER, OTHER], "get_weather")), two)
    assert not accepts(walker, constraint_of(forced([WEATHER, OTHER], "get_weather")), call(name="get"))


@pytest.mark.parametrize(
    ("parameters", "relaxed"),
    [
        ({"properties": {"x": {"type": "array", "uniqueItems": True}}}, "uniqueItems at #/properties/x"),
        ({"properties": {"x": {"not": {"const": 1}}}}, "not at #/properties/x"),
        ({"if": {}, "then": {}}, "if at #"),
        ({"properties": {"x": {"type": "string", "format": "regex"}}}, "format 'regex' at #/properties/x"),
        ({"properties": {"x": {"type": "tuple"}}}, "type 'tuple' at #/properties/x"),
        ({"properties": {"x": {"$ref": "other.json"}}}, "$ref at #/properties/x"),
        ({"properties": {" x": {}}}, "properties/ x at #"),
        ({"properties": {"a": {}}, "oneOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]}, "oneOf at #"),
        ({"additionalProperties": {}, "properties": {"a": {}}, "maxProperties": 3}, "maxProperties at #"),
    ],
)
def test_what_is_left_out_is_said(walker: Walker, parameters: Any, relaxed: str) -> None:
    steering = forced([tool("f", {"type": "object"} | parameters)])
    assert f"tool f: {relaxed}" in steering.relaxed
    walker.compiler.prepare(constraint_of(steering))


def test_a_schema_beyond_llguidance_leaves_the_keys(walker: Walker) -> None:
    look_ahead = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}, "required": ["x"]}
    steering = forced([tool("f", look_ahead)])
    assert steering.simpler is not None
    simple = Constraint(steering.simpler, None, steering.forbidden)
    assert accepts(walker, simple, call(("x", "anything"), name="f"))
    assert not accepts(walker, simple, call(("y", "anything"), name="f"))
    assert not accepts(walker, simple, call(name="f"))
