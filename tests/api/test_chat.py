"""POST /v1/chat/completions: shapes of whole answers and of streams."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.api.render.chat import ChatWriter
from server.api.render.parts import Identity, Shows
from server.chat.messages import (
    ContentDelta,
    Delta,
    ParsedTurn,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    fold,
)
from server.chat.options import ChatOptions
from server.engine.messages import FinishReason, Job, Timings
from server.generation import Choice, ChoiceEnd, ChoiceResult, ChoiceText, Generation
from tests.support.http import HELLO, Frames, frames_of, served
from tests.support.scripted import ScriptedBackend

CALL: list[Delta] = [ToolCallStart(0, "call_1", "get"), ToolCallArguments(0, '{"a":'), ToolCallArguments(0, "1}")]


# ── whole ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_whole_answer() -> None:
    async with served() as s:
        response = await s.chat(model="alias", max_tokens=100)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert len(body["id"]) == len("chatcmpl-") + 32
    assert isinstance(body.pop("created"), int)
    assert body.pop("timings")["predicted_n"] == 8
    del body["id"]
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "b0-scripted",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "<hello>"}, "finish_reason": "stop"},
        ],
        "usage": {
            "completion_tokens": 8,
            "prompt_tokens": 5,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"max_tokens": 3}, "length", "<he"),
        ({"stop": ["ll"]}, "stop", "<he"),
        ({"stop": "o"}, "stop", "<hell"),
        ({}, "stop", "<hello>"),
    ],
)
async def test_finish_reasons(fields: dict[str, Any], reason: str, text: str) -> None:
    async with served() as s:
        (choice,) = (await s.chat(**fields)).json()["choices"]
        streamed = await s.chunks(**fields)
    assert (choice["finish_reason"], choice["message"]["content"]) == (reason, text)
    assert streamed.data[-1]["choices"][0]["finish_reason"] == reason
    assert streamed.text == text


async def test_the_same_prompt_again_is_cached() -> None:
    async with served() as s:
        await s.chat()
        body = (await s.chat()).json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == body["timings"]["cache_n"] == 4
    assert body["usage"]["prompt_tokens"] == 5


async def test_several_choices() -> None:
    async with served() as s:
        body = (await s.chat(n=3)).json()
        streamed = await s.chunks(n=3, stream_options={"include_usage": True})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"<hello>"}
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 24)
    for i in range(3):
        own = [chunk["choices"][0] for chunk in streamed.data if chunk["choices"] and chunk["choices"][0]["index"] == i]
        assert own[0]["delta"] == {"role": "assistant", "content": None}
        assert "".join(choice["delta"].get("content") or "" for choice in own) == "<hello>"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
    assert streamed.data[-1]["usage"]["completion_tokens"] == 24


async def test_log_probabilities() -> None:
    async with served() as s:
        (choice,) = (await s.chat(logprobs=True, top_logprobs=2, max_tokens=2)).json()["choices"]
        streamed = await s.chunks(logprobs=True, top_logprobs=2, max_tokens=2)
        default = (await s.chat(logprobs=True, max_tokens=1)).json()["choices"][0]["logprobs"]["content"][0]
        none = (await s.chat(logprobs=False)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["<", "h"]
    assert entries[0] == {
        "id": 60,
        "token": "<",
        "bytes": [60],
        "logprob": -0.25,
        "top_logprobs": [
            {"id": 60, "token": "<", "bytes": [60], "logprob": -0.25},
            {"id": 65, "token": "A", "bytes": [65], "logprob": -2.0},
        ],
    }
    sent = [c["logprobs"]["content"] for chunk in streamed.data for c in chunk["choices"] if "logprobs" in c]
    assert [entry for content in sent for entry in content] == entries
    assert len(default["top_logprobs"]) == 20
    assert "logprobs" not in none


async def test_tokens_on_request() -> None:
    async with served() as s:
        (choice,) = (await s.chat(return_tokens=True)).json()["choices"]
        streamed = await s.chunks(return_tokens=True)
    assert bytes(choice["tokens"]) == b"<hello>"
    assert b"".join(bytes(c.get("tokens", [])) for chunk in streamed.data for c in chunk["choices"]) == b"<hello>"


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_stream() -> None:
    async with served() as s:
        response = await s.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    frames = frames_of(response.text)
    assert frames.done
    assert frames.text == "<hello>"
    assert all(len(chunk["choices"]) == 1 for chunk in frames.data), "nobody asked for a chunk without choices"
    assert len({(chunk["id"], chunk["created"]) for chunk in frames.data}) == 1
    first, last = frames.data[0], frames.data[-1]
    assert {key: first[key] for key in ("object", "model", "system_fingerprint")} == {
        "object": "chat.completion.chunk",
        "model": "tiny",
        "system_fingerprint": "b0-scripted",
    }
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]
    assert frames.data[1]["choices"] == [{"index": 0, "delta": {"content": "<"}, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert [chunk for chunk in frames.data if "timings" in chunk] == [last]
    assert not any("usage" in chunk for chunk in frames.data)


async def test_usage_comes_last_and_only_if_asked() -> None:
    async with served() as s:
        frames = await s.chunks(stream_options={"include_usage": True})
        without = await s.chunks(stream_options={"include_usage": False})
    *others, last = frames.data
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 13
    assert last["timings"]["predicted_n"] == 8
    assert not any("usage" in chunk or "timings" in chunk for chunk in others)
    assert all(chunk["choices"] for chunk in without.data)


async def test_an_answer_without_text_still_says_who_speaks() -> None:
    async with served(ScriptedBackend(reply=lambda _: "")) as s:
        frames = await s.chunks()
        body = (await s.chat()).json()
    assert frames.deltas == [{"role": "assistant", "content": None}, {}]
    assert body["choices"][0]["message"]["content"] == ""


async def test_timings_per_token() -> None:
    async with served() as s:
        frames = await s.chunks(timings_per_token=True)
    with_text = [chunk for chunk in frames.data if chunk["choices"][0]["delta"].get("content")]
    assert [chunk["timings"]["predicted_n"] for chunk in with_text] == [1, 2, 3, 4, 5, 6, 7]


async def test_prompt_progress() -> None:
    async with served(ScriptedBackend(reply=lambda _: "x", n_batch=8)) as s:
        frames = await s.chunks(messages=[{"role": "user", "content": "p" * 20}], return_progress=True)
        silent = await s.chunks(messages=[{"role": "user", "content": "q" * 20}])
        whole = await s.chat(return_progress=True)
    steps = [chunk["prompt_progress"] for chunk in frames.data if "prompt_progress" in chunk]
    assert [(step["total"], step["cache"], step["processed"]) for step in steps] == [
        (20, 0, 0),
        (20, 0, 8),
        (20, 0, 16),
        (20, 0, 20),
    ]
    assert steps[0]["time_ms"] == 0
    assert all(c["choices"][0]["delta"]["role"] == "assistant" for c in frames.data if "prompt_progress" in c)
    assert not any("prompt_progress" in chunk for chunk in silent.data)
    assert whole.status_code == 200


async def test_text_of_any_script_is_cut_between_characters_only() -> None:
    async with served(ScriptedBackend(reply=lambda _: "größe 中文 👍🏽 \u2028 \x00")) as s:
        frames = await s.chunks()
        body = (await s.chat()).json()
    assert frames.text == body["choices"][0]["message"]["content"] == "größe 中文 👍🏽 \u2028 \x00"


# ── deltas of dialects that have more than content ───────────────────────────────────────────────────────────────────


class _Idle:
    """A job stream that the writer only asks for its job."""

    job = Job(1, [1])


def write(deltas: list[list[Delta]], reason: FinishReason = FinishReason.END_OF_TURN) -> tuple[Frames, dict[str, Any]]:
    """The same turn as a stream, one event for each list, and as a whole."""
    choice = Choice(0, _Idle(), reader=None, n_prompt=1)  # type: ignore[arg-type]
    generation = Generation.__new__(Generation)
    generation.choices = [choice]
    generation.prompts = [[1]]
    choice.has_tool_calls = any(isinstance(delta, ToolCallStart) for event in deltas for delta in event)
    identity = Identity("chatcmpl-1", 1, "tiny", "b0")
    writer = ChatWriter(identity, generation, Shows())
    end = ChoiceEnd(0, [], reason, "", False, Timings())
    frames = [writer.chunk(ChoiceText(0, "", event, [], [], Timings())) for event in deltas]
    stream = b"".join([*frames, writer.chunk(end), writer.last()]).decode()
    turn = fold([delta for event in deltas for delta in event])
    whole = ChatWriter(identity, generation, Shows()).whole([ChoiceResult(end, turn, "", [], [])])
    return frames_of(stream), msgspec.json.decode(whole)["choices"][0]


def test_reasoning_has_two_names() -> None:
    frames, choice = write([[ReasoningDelta("Hm"), ReasoningDelta("m")], [], [ContentDelta("Yes")]])
    assert frames.deltas == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": "m", "reasoning": "m"},
        {"content": "Yes"},
        {},
    ]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Hmm",
        "reasoning": "Hmm",
    }


def test_tool_calls() -> None:
    frames, choice = write([[delta] for delta in CALL])
    assert frames.deltas == [
        {"role": "assistant", "content": None},
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {},
    ]
    assert frames.data[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}}],
    }


def test_content_stands_beside_calls_and_a_cut_answer_is_told_as_cut() -> None:
    frames, choice = write([[ContentDelta("I look."), *CALL]], FinishReason.LENGTH)
    assert choice["message"]["content"] == "I look."
    assert frames.data[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"


def test_fold_of_the_deltas_is_the_whole() -> None:
    assert fold([ContentDelta("a"), *CALL, ContentDelta("b")]).content == "ab"
    assert fold([]) == ParsedTurn()


# ── what the prompt is ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_apply_template_and_input_tokens_agree_with_the_chat() -> None:
    messages = [
        {"role": "developer", "content": "Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": " r"},
    ]
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    async with served(ScriptedBackend(reply=lambda _: "x", chat_template=template)) as s:
        prompt = (await s.post("/apply-template", {"messages": messages})).json()
        count = (await s.post("/v1/chat/completions/input_tokens", {"messages": messages, "max_tokens": "any"})).json()
        usage = (await s.chat(messages=messages)).json()["usage"]
    assert prompt == {"prompt": "system:Be brief. ;user:a\nb;assistant:;tool: r;"}
    assert count == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}


async def test_tools_reach_the_template_unless_the_choice_is_none() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    template = "{{ (tools or 'no tools') | tojson }}"
    async with served(ScriptedBackend(reply=lambda _: "x", chat_template=template)) as s:
        body = {"messages": HELLO, "tools": [tool]}
        auto = (await s.post("/apply-template", body)).json()["prompt"]
        none = (await s.post("/apply-template", body | {"tool_choice": "none"})).json()["prompt"]
        answer = (await s.chat(tools=[tool], tool_choice="auto", parallel_tool_calls=False)).json()
    assert auto == '[{"type": "function", "function": {"name": "f", "strict": true}}]'
    assert none == '"no tools"'
    assert answer["choices"][0]["message"]["content"] == "x"


async def test_the_trailing_assistant_turn_is_continued() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    turns = [*HELLO, {"role": "assistant", "content": "Well,"}]
    async with served(ScriptedBackend(reply=lambda _: " hello", chat_template=template)) as s:

        async def prompt(**fields: Any) -> str:
            return str((await s.post("/apply-template", {"messages": turns} | fields)).json()["prompt"])

        assert await prompt() == "[user]hello[a]Well,"
        assert await prompt(continue_final_message=True) == "[user]hello[a]Well,"
        assert await prompt(continue_final_message=False) == "[user]hello[assistant]Well,[a]"
        assert await prompt(add_generation_prompt=True) == "[user]hello[assistant]Well,[a]"
        assert await prompt(continue_final_message=False, add_generation_prompt=False) == "[user]hello[assistant]Well,"
        answer = (await s.chat(messages=turns)).json()
    assert answer["choices"][0]["message"]["content"] == " hello"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "disabled", "clear_thinking": False}},
            {"clear_thinking": False, "enable_thinking": False},
        ),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, {"enable_thinking": True}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "x": "ü"}},
            {"enable_thinking": True, "x": "ü"},
        ),
    ],
)
async def test_thinking_controls_become_template_variables(fields: dict[str, Any], seen: dict[str, Any]) -> None:
    names = ("reasoning_effort", "enable_thinking", "clear_thinking", "x")
    template = "".join(f"{{% if {n} is defined %}}{n} {{{{ {n} | tojson }}}}\n{{% endif %}}" for n in names)
    async with served(ScriptedBackend(chat_template=template)) as s:
        response = await s.post("/apply-template", {"messages": HELLO} | fields)
    lines = [line.split(" ") for line in response.json()["prompt"].splitlines()]
    assert {name: msgspec.json.decode(value) for name, value in lines} == seen


def billed(cch: str) -> list[dict[str, Any]]:
    header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};\n"
    return [{"role": "system", "content": header + "You are an agent. " * 9}, *HELLO]


@pytest.mark.parametrize("normalize", [True, False])
async def test_a_line_that_changes_with_each_request_is_left_out(
    normalize: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The second prompt is taken from the cache, and the log says once why."""
    caplog.set_level("INFO", "server.service")
    cached = []
    async with served(chat=ChatOptions(normalize=normalize)) as s:
        for cch in ("fa690", "1c8b4"):
            usage = (await s.chat(messages=billed(cch))).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        shown = (await s.post("/apply-template", {"messages": billed("fa690")})).json()["prompt"]
        metrics = (await s.http.get("/metrics")).text
    assert ("x-anthropic" in shown) is not normalize
    assert (cached[1] > 0.9) is normalize
    assert f"glmserve_prompts_normalized_total {2.0 if normalize else 0.0}" in metrics
    told = [record.getMessage() for record in caplog.records if "billing line" in record.getMessage()]
    assert len(told) == normalize
    assert all("fa690" not in line for line in told)


@pytest.mark.parametrize("role", ["usr", "alien", "", None, 7])
async def test_an_unknown_role_is_refused_and_the_known_ones_are_named(role: object) -> None:
    async with served(ScriptedBackend()) as s:
        answer = await s.chat(messages=[{"role": role, "content": "hello"}])
    assert answer.status_code == 400
    assert "'system', 'developer', 'user', 'assistant' or 'tool'" in answer.json()["error"]["message"]
