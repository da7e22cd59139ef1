"""GLM's turns over HTTP: reasoning, tool calls and ends, streamed and whole alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.chat.glm_generation import Generation
from server.chat.glm_templates import fallback_template
from server.chat.options import ChatOptions, ReasoningFormat, Thinking
from tests.support.http import HELLO, Frames, Served, assert_idle, served
from tests.support.scripted import ScriptedBackend, tokens_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"城市": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CITY = (
    "<tool_call>weather<arg_key>城市</arg_key><arg_value>上海</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
NOW = "<tool_call>now</tool_call>"


def glm(reply: str, generation: Generation = Generation.GLM_5_2) -> ScriptedBackend:
    return ScriptedBackend(reply=lambda _: reply, chat_template=fallback_template(generation), n_ctx=16384)


def joined(frames: Frames) -> tuple[dict[str, Any], str]:
    """What a client makes of a stream: the message, and the finish reason."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in frames.deltas:
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert set(part) == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    (reason,) = [c["finish_reason"] for chunk in frames.data for c in chunk["choices"] if c["finish_reason"]]
    return message, reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] | {"type": call["type"]} for call in message.get("tool_calls", ())]
    given = {key: value for key, value in message.items() if value is not None and value != "" and key != "role"}
    return given | ({"tool_calls": calls} if calls else {})


async def both(s: Served, **fields: Any) -> tuple[dict[str, Any], str]:
    """The answer whole and streamed, which must be the same."""
    body = (await s.chat(**fields)).json()
    (choice,) = body["choices"]
    streamed, reason = joined(await s.chunks(**fields))
    assert without_ids(streamed) == without_ids(choice["message"])
    assert reason == choice["finish_reason"]
    ids = [call["id"] for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    return without_ids(choice["message"]), reason


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


REASONED = {"reasoning_content": "Hm.", "reasoning": "Hm."}
OFFERED = {"tools": TOOLS}
IN_CITY, AT_ONCE = call("weather", 城市="上海", days=2), call("now")


@pytest.mark.parametrize(
    ("reply", "fields", "message", "reason"),
    [
        ("Hm.</think>Yes.", {}, REASONED | {"content": "Yes."}, "stop"),
        ("Yes.", {"enable_thinking": False}, {"content": "Yes."}, "stop"),
        ("Hm.</think>" + CITY, OFFERED, REASONED | {"tool_calls": [IN_CITY]}, "tool_calls"),
        ("Hm.</think>" + NOW, OFFERED, REASONED | {"tool_calls": [AT_ONCE]}, "tool_calls"),
        (
            "Hm.</think>I look." + CITY + NOW,
            OFFERED,
            REASONED | {"content": "I look.", "tool_calls": [IN_CITY, AT_ONCE]},
            "tool_calls",
        ),
        (
            "Hm.</think>" + CITY + NOW + "never read",
            OFFERED | {"parallel_tool_calls": False},
            REASONED | {"tool_calls": [IN_CITY]},
            "tool_calls",
        ),
        ("Hm.</think>" + NOW, OFFERED | {"tool_choice": "none"}, REASONED | {"content": NOW}, "stop"),
        ("Hm.</think>" + NOW, OFFERED | {"parse_tool_calls": False}, REASONED | {"content": NOW}, "stop"),
        ("Hm.</think>Yes.", {"reasoning_format": "none"}, {"content": "<think>Hm.</think>Yes."}, "stop"),
        ("Hm.</think>Yes.", {"reasoning_format": "auto"}, REASONED | {"content": "Yes."}, "stop"),
        (
            "Hm.</think>Yes.",
            {"reasoning_format": "deepseek-legacy"},
            REASONED | {"content": "<think>Hm.</think>Yes."},
            "stop",
        ),
        ("Hm.</think>Yes.<|user|>And?", {}, REASONED | {"content": "Yes."}, "stop"),
        ("Hm.</think>" + NOW + "<|observation|>3 pm", OFFERED, REASONED | {"tool_calls": [AT_ONCE]}, "tool_calls"),
        # cut: calls that were whole stay, the one that was not is dropped, and no markup is left
        ("Hm.</think>" + CITY, OFFERED | {"max_tokens": 40}, REASONED, "length"),
        ("Hm.</think>" + NOW + CITY, OFFERED | {"max_tokens": 50}, REASONED | {"tool_calls": [AT_ONCE]}, "length"),
        ("Hm.", {"max_tokens": 3}, REASONED, "length"),
        # more was meant than what came before a stop text
        ("Hm.</think>" + CITY, OFFERED | {"stop": ["上"]}, REASONED, "stop"),
        ("Hm. Yes.", {"stop": [" Yes"]}, REASONED, "stop"),
    ],
)
async def test_an_answer(reply: str, fields: dict[str, Any], message: dict[str, Any], reason: str) -> None:
    async with served(glm(reply)) as s:
        assert await both(s, **fields) == (message, reason)
        await assert_idle(s.engine)


@pytest.mark.parametrize(
    ("reply", "fields", "n_reasoning"),
    [
        ("Hm.</think>Yes.", {}, 3),
        ("Yes.", {"enable_thinking": False}, 0),
        ("Hm.</think>" + NOW, OFFERED, 3),
        ("Hm.", {"max_tokens": 2}, 2),
    ],
)
async def test_usage_tells_the_tokens_of_reasoning(reply: str, fields: dict[str, Any], n_reasoning: int) -> None:
    async with served(glm(reply)) as s:
        whole = (await s.chat(**fields, n=2)).json()["usage"]
        streamed = (await s.chunks(**fields, n=2, stream_options={"include_usage": True})).data[-1]["usage"]
    assert whole["completion_tokens_details"] == {"reasoning_tokens": 2 * n_reasoning}
    assert streamed["completion_tokens_details"] == whole["completion_tokens_details"]
    assert whole["completion_tokens"] > 2 * n_reasoning - 1


async def test_one_choice_of_several_may_be_cut() -> None:
    backend = glm("")
    texts = ["</think>Yes.<|user|>" + "x" * 500, "</think>No."]
    backend.replies = {job_id: tokens_of(text) for job_id, text in enumerate(texts, 1)}
    async with served(backend) as s:
        body = (await s.chat(n=2)).json()
        await assert_idle(s.engine)
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Yes.", "No."}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert body["usage"]["completion_tokens"] < 100


async def test_ignoring_the_end_means_it() -> None:
    async with served(glm("</think>Yes.<|user|>" + "x" * 90)) as s:
        body = (await s.chat(ignore_eos=True, max_tokens=50)).json()
    assert body["usage"]["completion_tokens"] == 50
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "Yes."


# ── the budget of reasoning; the script goes on where it was when a token was forced ──────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({"thinking": {"budget_tokens": 2}}, "ab", "cYes."),
        ({"thinking_budget_tokens": 2, "reasoning_budget_message": "So:"}, "abSo:", "cYes."),
        ({"reasoning_budget_tokens": 0}, "", "abcYes."),
        ({"thinking_token_budget": 3}, "abc", "Yes."),
        ({"thinking": {"budget_tokens": 9}}, "abc", "Yes."),
        ({"thinking": {"budget_tokens": -1}}, "abc", "Yes."),
        ({}, "a", "bcYes."),
    ],
)
async def test_the_budget_of_reasoning(fields: dict[str, Any], reasoning: str, content: str) -> None:
    chat = ChatOptions(thinking=Thinking(budget=1))
    async with served(glm("abc</think>Yes."), chat=chat) as s:
        message, reason = await both(s, **fields)
        usage = (await s.chat(**fields)).json()["usage"]
    assert (message.get("reasoning_content", ""), message["content"], reason) == (reasoning, content, "stop")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(reasoning)


async def test_the_budget_waits_for_a_whole_character() -> None:
    async with served(glm("é€</think>Yes.")) as s:
        message, _ = await both(s, thinking_budget_tokens=3)
    assert message["reasoning_content"] == "é€"


async def test_a_budget_and_a_grammar() -> None:
    async with served(glm("abc</think>Yes.")) as s:
        message, _ = await both(s, grammar="root ::= [a-z]+", thinking_budget_tokens=2)
        assert message["reasoning_content"] == "ab"


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def prompt(s: Served, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    response = await s.post("/apply-template", {"messages": messages or HELLO} | fields)
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, "Max", True),
        ({"reasoning_effort": "low"}, "High", True),
        ({"reasoning_effort": "medium"}, "High", True),
        ({"reasoning_effort": "high"}, "High", True),
        ({"reasoning_effort": "xhigh"}, "Max", True),
        ({"reasoning_effort": "minimal"}, None, False),
        ({"reasoning_effort": "none"}, None, False),
        ({"enable_thinking": False}, None, False),
        ({"thinking": {"type": "disabled"}}, None, False),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "Max", True),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "Max", True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "Max", True),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, None, False),
    ],
)
async def test_thinking_as_hosts_of_glm_document_it(fields: dict[str, Any], effort: str | None, thinks: bool) -> None:
    async with served(glm("x")) as s:
        text = await prompt(s, **fields)
    assert text.startswith(
        f"[gMASK]<sop><|system|>Reasoning Effort: {effort}<|user|>" if effort else "[gMASK]<sop><|user|>"
    )
    assert text.endswith("<|assistant|><think>" if thinks else "<|assistant|><think></think>")


async def test_an_effort_that_does_not_exist() -> None:
    async with served(glm("x")) as s:
        response = await s.chat(reasoning_effort="ultra")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning_effort"


async def test_the_server_s_own_choice_and_a_request_s() -> None:
    chat = ChatOptions(thinking=Thinking(enabled=False), reasoning_format=ReasoningFormat.NONE)
    async with served(glm("Hm.</think>Yes."), chat=chat) as s:
        assert (await prompt(s)).endswith("<think></think>")
        assert (await prompt(s, thinking={"type": "enabled"})).endswith("<|assistant|><think>")
        message, _ = await both(s, thinking={"type": "enabled"})
        own, _ = await both(s, thinking={"type": "enabled"}, reasoning_format="deepseek")
    assert message == {"content": "<think>Hm.</think>Yes."}
    assert own == REASONED | {"content": "Yes."}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_of_earlier_turns(name: str) -> None:
    history = [*HELLO, {"role": "assistant", "content": "Hi", name: "Old."}, {"role": "user", "content": "And?"}]
    async with served(glm("x")) as s:
        assert "Old." not in await prompt(s, history)
        assert "<think>Old.</think>Hi" in await prompt(s, history, thinking={"clear_thinking": False})


async def test_a_tool_loop() -> None:
    """The answer goes back as it came, with results; the next prompt has the model's own words in its own markup."""
    async with served(glm("Hm.</think>" + CITY + NOW)) as s:
        first = (await s.chat(tools=TOOLS)).json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "rain"},
            {
                "role": "tool",
                "tool_call_id": first["tool_calls"][1]["id"],
                "content": [{"type": "text", "text": "3 pm"}],
            },
        ]
        before = await prompt(s, tools=TOOLS)
        after = await prompt(s, [*HELLO, first, *results], tools=TOOLS)
        s.backend.reply = lambda _: "It rains.</think>Take an umbrella."
        message, reason = await both(s, messages=[*HELLO, first, *results], tools=TOOLS)
    assert after == before + (
        f"Hm.</think>{CITY}{NOW}<|observation|><tool_response>rain</tool_response><tool_response>3 pm</tool_response>"
        "<|assistant|><think>"
    )
    assert (message["content"], reason) == ("Take an umbrella.", "stop")


async def test_a_turn_that_is_continued_starts_where_it_stopped() -> None:
    async with served(glm(" and blue.")) as s:
        content = [*HELLO, {"role": "assistant", "content": "Wide"}]
        thoughts = [*HELLO, {"role": "assistant", "content": None, "reasoning_content": "Well"}]
        assert (await prompt(s, content)).endswith("<|assistant|><think></think>Wide")
        assert (await both(s, messages=content))[0] == {"content": " and blue."}
        s.backend.reply = lambda _: ", so.</think>Blue."
        assert (await prompt(s, thoughts)).endswith("<|assistant|><think>Well")
        message, _ = await both(s, messages=thoughts)
    assert message == {"reasoning_content": ", so.", "reasoning": ", so.", "content": "Blue."}


async def test_a_broken_template_is_shown_as_what_replaced_it() -> None:
    backend = glm("x")
    backend.chat_template = "[gMASK]<arg_key>{% if %}"
    async with served(backend) as s:
        assert (await s.http.get("/props")).json()["chat_template"] == fallback_template(Generation.GLM_4_7)
        assert (await prompt(s)).endswith("<|user|>hello<|assistant|><think>")
