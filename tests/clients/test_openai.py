"""The openai SDK: what may be asked of an answer's form and of its calls, with a model that knows the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import MODEL, arguments_of

pytestmark = pytest.mark.e2e


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def fields(dialogue: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The dialogue's first question."""
    asked: dict[str, Any] = {"model": MODEL, "messages": dialogue["messages"][:1], "temperature": 0}
    if "tools" in dialogue:
        asked["tools"] = dialogue["tools"]
    extra = {"chat_template_kwargs": dialogue.get("template_kwargs", {})} | more.pop("extra_body", {})
    return asked | {"extra_body": extra} | more


def calls(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


# ── structured output ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dialogue_id", ["json-01", "json-05", "json-06"])
def test_parse_gives_the_answer_of_the_model(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]], dialogue_id: str
) -> None:
    dialogue = dialogues[dialogue_id]
    answer = client.chat.completions.parse(**fields(dialogue), response_format=Person)
    expected = dialogue["messages"][1]
    assert answer.choices[0].message.parsed == Person(**json.loads(expected["content"]))
    assert answer.choices[0].message.content == expected["content"], "what fits already is left as it is"
    thoughts = getattr(answer.choices[0].message, "reasoning_content", None)
    assert thoughts == expected.get("reasoning_content")


def test_parse_streamed(client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]) -> None:
    with client.chat.completions.stream(**fields(dialogues["json-05"]), response_format=Person) as stream:
        events = list(stream)
    assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada", age=36)
    assert any(event.type == "content.delta" for event in events)


@pytest.mark.parametrize(
    ("extra", "answers"),
    [
        ({"choice": ["Tallinn", "Riga"]}, {"Tallinn", "Riga"}),
        ({"guided_choice": ["Tallinn", "Riga"]}, {"Tallinn", "Riga"}),
        ({"structured_outputs": {"choice": ["Tallinn", "Riga"]}}, {"Tallinn", "Riga"}),
        ({"regex": "T[a-z]{2}!"}, None),
        ({"guided_regex": "T[a-z]{2}!"}, None),
        ({"grammar": 'root ::= "T" [a-z] [a-z] "!"'}, None),
        ({"grammar": "%llguidance {}\nstart: /T[a-z]{2}!/"}, None),
        ({"guided_json": {"type": "integer", "minimum": 100, "maximum": 999}}, {str(n) for n in range(100, 1000)}),
    ],
)
@pytest.mark.parametrize("dialogue_id", ["operator-01", "operator-02"])  # with reasoning and without
def test_other_forms(
    client: openai.OpenAI,
    dialogues: dict[str, dict[str, Any]],
    dialogue_id: str,
    extra: dict[str, Any],
    answers: set[str] | None,
) -> None:
    """The model means something else in each case, but only its reasoning is free."""
    answer = client.chat.completions.create(**fields(dialogues[dialogue_id], extra_body=extra))
    message = answer.choices[0].message
    assert message.content is not None
    assert message.content in answers if answers else (len(message.content), message.content[::3]) == (4, "T!")
    assert getattr(message, "reasoning_content", None) == dialogues[dialogue_id]["messages"][1].get("reasoning_content")
    assert answer.choices[0].finish_reason == "stop"


def test_reasoning_beyond_its_budget_and_then_the_form(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]
) -> None:
    extra = {"thinking_budget_tokens": 2, "choice": ["Tallinn", "Riga"]}
    answer = client.chat.completions.create(**fields(dialogues["operator-01"], extra_body=extra))
    assert answer.choices[0].message.content in ("Tallinn", "Riga")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


def test_a_form_that_is_cut(client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]) -> None:
    form = {"json_schema": Person.model_json_schema()}
    answer = client.chat.completions.create(**fields(dialogues["json-01"], extra_body=form), max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


def test_raw_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital is", temperature=0, extra_body={"choice": ["Riga", "Tallinn"]}
    )
    assert answer.choices[0].text in ("Riga", "Tallinn")
    assert answer.choices[0].finish_reason == "stop"


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def streamed_calls(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    parts: list[list[str]] = []
    reason = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == len(parts):
                parts.append([call.function.name, ""])
            parts[call.index][1] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return [(name, json.loads(arguments)) for name, arguments in parts], reason


@pytest.mark.parametrize("dialogue_id", ["tool-15", "tool-16", "parallel-01", "parallel-06", "loop-06"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_that_the_model_makes_anyway(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]], dialogue_id: str, choice: str
) -> None:
    dialogue = dialogues[dialogue_id]
    expected = arguments_of(dialogue["messages"][1])
    asked = fields(dialogue, tool_choice=choice)
    answer = client.chat.completions.create(**asked).choices[0]
    assert (calls(answer.message), answer.finish_reason) == (expected, "tool_calls")
    assert streamed_calls(client, asked) == (expected, "tool_calls")


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}},
            {"get_time"},
        ),
    ],
)
@pytest.mark.parametrize("dialogue_id", ["operator-01", "operator-02"])
def test_calls_that_the_model_would_not_make(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]], dialogue_id: str, choice: Any, names: set[str]
) -> None:
    asked = fields(dialogues[dialogue_id], tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False)
    answer = client.chat.completions.create(**asked).choices[0]
    [(name, arguments)] = calls(answer.message)
    assert name in names
    assert arguments in ({"city": "Oslo"}, {"city": "Rome"}) if name == "get_weather" else arguments == {}
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert streamed_calls(client, asked) == ([(name, arguments)], "tool_calls")


def test_a_call_of_its_own_accord_is_held_to_the_schema(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]
) -> None:
    """It wants to ask for Paris, which this tool does not know."""
    dialogue = dialogues["tool-01"]
    answer = client.chat.completions.create(**fields(dialogue, tools=[WEATHER])).choices[0].message
    assert calls(answer) in ([("get_weather", {"city": "Oslo"})], [("get_weather", {"city": "Rome"})])
    assert getattr(answer, "reasoning_content", None) == dialogue["messages"][1]["reasoning_content"]


def test_a_call_of_its_own_accord_is_held_to_the_tools_that_are_allowed(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]
) -> None:
    dialogue = dialogues["tool-01"]
    tools = [*dialogue["tools"], CLOCK]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}
    answer = client.chat.completions.create(**fields(dialogue, tools=tools, tool_choice=choice)).choices[0].message
    assert {name for name, _ in calls(answer)} <= {"get_time"}


@pytest.mark.parametrize(
    ("city", "said"),
    [
        ({"type": "string", "not": {"const": "x"}}, "tool get_weather: not at #/properties/city"),
        ({"type": "string", "pattern": "(?!x)"}, "invalid regex"),
        ({"type": "string", "enum": []}, "only the names of tools and arguments are enforced (Unsatisfiable schema"),
        ({"type": "string"}, None),
    ],
)
def test_what_of_a_tool_is_not_enforced_is_said(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]], city: dict[str, Any], said: str | None
) -> None:
    function = {"name": "get_weather", "description": "Weather in a city."}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool = {"type": "function", "function": {**function, "parameters": parameters}}
    for choice in ("auto", "required"):
        asked = fields(dialogues["tool-01"], tools=[tool], tool_choice=choice)
        answer = client.chat.completions.with_raw_response.create(**asked)
        warning = answer.headers.get("X-Constraint-Warning")
        assert warning is None if said is None else said in str(warning)
        assert [name for name, _ in calls(answer.parse().choices[0].message)] == ["get_weather"]


def test_one_of_two_calls(client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]) -> None:
    dialogue = dialogues["parallel-01"]
    first = arguments_of(dialogue["messages"][1])[:1]
    for choice in ("auto", "required"):
        asked = fields(dialogue, tool_choice=choice, parallel_tool_calls=False)
        assert calls(client.chat.completions.create(**asked).choices[0].message) == first
        assert streamed_calls(client, asked) == (first, "tool_calls")


def test_no_calls(client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]) -> None:
    answer = client.chat.completions.create(**fields(dialogues["tool-01"], tool_choice="none")).choices[0]
    assert answer.message.tool_calls is None
    assert answer.finish_reason == "stop"


def test_a_forced_call_that_is_cut(client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]) -> None:
    asked = fields(dialogues["tool-03"], tool_choice="required", max_tokens=4)
    answer = client.chat.completions.create(**asked).choices[0]
    assert (answer.message.tool_calls, answer.message.content or "", answer.finish_reason) == (None, "", "length")


def test_a_form_or_calls(client: openai.OpenAI, dialogues: dict[str, dict[str, Any]]) -> None:
    form = {"json_schema": Person.model_json_schema()}
    expected = arguments_of(dialogues["tool-15"]["messages"][1])
    answer = client.chat.completions.create(**fields(dialogues["tool-15"], extra_body=form)).choices[0]
    assert calls(answer.message) == expected
    talk = client.chat.completions.create(**fields(dialogues["json-05"], tools=[WEATHER], extra_body=form)).choices[0]
    if not calls(talk.message):
        Person.model_validate_json(talk.message.content or "")
