"""Agent libraries: a tool loop with each, and their helpers for structured answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import instructor
import openai
import pytest
from agents import Agent, FunctionTool, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.clients.conftest import MODEL, arguments_of

pytestmark = pytest.mark.e2e

QUIETLY = {"chat_template_kwargs": {"enable_thinking": False}}


class Person(BaseModel):
    """A person."""

    name: str
    age: int = Field()


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


# ── openai-agents ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents_runs_a_tool_loop(
    async_client: openai.AsyncOpenAI, dialogues: dict[str, dict[str, Any]], streamed: bool
) -> None:
    dialogue = dialogues["tool-03"]
    question, called, result, answer = dialogue["messages"]
    function = dialogue["tools"][0]["function"]
    asked: list[dict[str, Any]] = []

    async def invoke(_: Any, arguments: str) -> str:
        asked.append(json.loads(arguments))
        return str(result["content"])

    set_tracing_disabled(True)
    tool = FunctionTool(
        function["name"], function["description"], function["parameters"], invoke, strict_json_schema=False
    )
    agent = Agent(
        name="test",
        model=OpenAIChatCompletionsModel(MODEL, async_client),
        tools=[tool],
        model_settings=ModelSettings(temperature=0, extra_body=QUIETLY),
    )
    if streamed:
        running = Runner.run_streamed(agent, question["content"], max_turns=4)
        assert [event.type async for event in running.stream_events()]
        final = running.final_output
    else:
        final = (await Runner.run(agent, question["content"], max_turns=4)).final_output
    assert [(function["name"], each) for each in asked] == arguments_of(called)
    assert final == answer["content"]


# ── langchain ────────────────────────────────────────────────────────────────────────────────────────────────────────


def langchain_model(base_url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key=SecretStr("none"), temperature=0, max_retries=0, **fields)


@pytest.mark.parametrize("streamed", [False, True])
def test_langchain_runs_a_tool_loop(base_url: str, dialogues: dict[str, dict[str, Any]], streamed: bool) -> None:
    dialogue = dialogues["tool-03"]
    question, called, result, answer = dialogue["messages"]
    model = langchain_model(base_url, extra_body=QUIETLY).bind_tools(dialogue["tools"])
    messages: list[BaseMessage] = [HumanMessage(question["content"])]
    if streamed:
        asking: Any = None
        for chunk in model.stream(messages):
            asking = chunk if asking is None else asking + chunk
    else:
        asking = model.invoke(messages)
    assert [(call["name"], call["args"]) for call in asking.tool_calls] == arguments_of(called)
    messages += [asking, ToolMessage(result["content"], tool_call_id=asking.tool_calls[0]["id"])]
    assert model.invoke(messages).content == answer["content"]


@pytest.mark.parametrize(
    ("method", "dialogue_id"), [("json_schema", "json-05"), ("function_calling", "tool-15"), ("json_mode", "json-05")]
)
def test_langchain_structured_output(
    base_url: str, dialogues: dict[str, dict[str, Any]], method: Any, dialogue_id: str
) -> None:
    model = langchain_model(base_url).with_structured_output(Person, method=method)
    assert model.invoke(dialogues[dialogue_id]["messages"][0]["content"]) == Person(name="Ada", age=36)


# ── instructor ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "dialogue_id"),
    [
        (instructor.Mode.TOOLS, "tool-15"),
        (instructor.Mode.JSON_SCHEMA, "json-05"),
    ],
)
def test_instructor(
    client: openai.OpenAI, dialogues: dict[str, dict[str, Any]], mode: instructor.Mode, dialogue_id: str
) -> None:
    person = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=dialogues[dialogue_id]["messages"][:1],
        response_model=Person,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(person, Person), "of a class that instructor derives from it"
    assert person.model_dump() == {"name": "Ada", "age": 36}
