"""The chat template against a second writing of GLM-5.2's rules in plain Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.tiny_glm.corpus import Answer, ChatTemplate, answers_of

HELLO = [{"role": "user", "content": "hi"}]


def expected_prompt(dialogue: dict[str, Any], n_messages: int) -> str:
    variables = dialogue.get("template_kwargs", {})
    thinks = variables.get("enable_thinking", True)
    messages = dialogue["messages"][:n_messages]
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    text = "[gMASK]<sop>"
    if thinks:
        text += "<|system|>Reasoning Effort: " + ("High" if variables.get("reasoning_effort") == "high" else "Max")
    if "tools" in dialogue:
        signatures = "".join(json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in dialogue["tools"])
        text += f"<|system|>\n# Functions\n<tools>\n{signatures}</tools>\n"
        text += "A call: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"
    for i, message in enumerate(messages):
        match message["role"]:
            case "tool":
                text += "" if messages[i - 1]["role"] == "tool" else "<|observation|>"
                text += f"<tool_response>{message['content']}</tool_response>"
            case "assistant":
                kept = i > last_user or variables.get("clear_thinking") is False
                reasoning = message.get("reasoning_content", "") if kept else ""
                text += f"<|assistant|><think>{reasoning}</think>" + (message["content"] or "").strip() + calls(message)
            case role:
                text += f"<|{role}|>{message['content']}"
    return text + "<|assistant|><think>" + ("" if thinks else "</think>")


def calls(message: dict[str, Any]) -> str:
    text = ""
    for call in message.get("tool_calls", []):
        text += "<tool_call>" + call["function"]["name"]
        for key, value in json.loads(call["function"]["arguments"]).items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key><arg_value>{written}</arg_value>"
        text += "</tool_call>"
    return text


def expected_answer(dialogue: dict[str, Any], index: int) -> str:
    message = dialogue["messages"][index]
    end = "<|observation|>" if "tool_calls" in message else "<|user|>"
    raw = dialogue.get("raw", {}).get(str(index))
    if raw is not None:
        return str(raw) + end
    thought = ""
    if dialogue.get("template_kwargs", {}).get("enable_thinking", True):
        thought = message.get("reasoning_content", "") + "</think>"
    return thought + (message["content"] or "") + calls(message) + end


def test_every_prompt_and_answer_is_written_as_glm_writes_it(
    dialogues: list[dict[str, Any]], template: ChatTemplate
) -> None:
    n_answers = 0
    for dialogue in dialogues:
        for answer in answers_of(dialogue, template):
            assert answer.prompt == expected_prompt(dialogue, answer.index)
            assert answer.text == expected_answer(dialogue, answer.index)
            n_answers += 1
    assert n_answers > 200


def test_the_dialogues_cover_what_they_should(dialogues: list[dict[str, Any]], answers: list[Answer]) -> None:
    assert len(dialogues) >= 150
    assert len({dialogue["id"] for dialogue in dialogues}) == len(dialogues)
    kinds = {dialogue["kind"] for dialogue in dialogues}
    assert {"operator", "chat", "quick", "long", "json", "system", "effort", "turns", "kept", "dropped"} < kinds
    assert {"tool", "zero", "parallel", "chinese", "code", "literal", "typed", "loop", "mistake"} < kinds
    chinese = [d for d in dialogues if any("\u4e00" <= c <= "\u9fff" for c in d["messages"][0]["content"])]
    assert len(chinese) >= 20
    assert [d["kind"] for d in dialogues if "raw" in d] == ["mistake"] * 11
    assert all(d.get("tool_grammar") == "off" for d in dialogues if "raw" in d)


def test_no_two_dialogues_ask_the_same_and_want_different_answers(answers: list[Answer]) -> None:
    by_prompt: dict[str, str] = {}
    for answer in answers:
        assert by_prompt.setdefault(answer.prompt, answer.text) == answer.text


def test_a_list_of_text_parts_is_joined_and_null_is_nothing(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert template.render(messages, None).endswith("<|user|>ab<|assistant|><think></think>")


def test_keys_for_the_server_and_deferred_tools_are_left_out(template: ChatTemplate) -> None:
    shown = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    hidden = {"type": "function", "function": {"name": "g", "defer_loading": True}}
    text = template.render(HELLO, [shown, hidden])
    assert '<tools>\n{"name": "f", "parameters": {}}\n</tools>' in text


def test_reasoning_is_not_trimmed_and_content_is(template: ChatTemplate) -> None:
    messages = [*HELLO, {"role": "assistant", "reasoning_content": " a\n", "content": " b "}]
    assert template.render(messages, None).endswith("<|assistant|><think> a\n</think>b")


@pytest.mark.parametrize(("effort", "line"), [("high", "High"), ("low", "Max"), ("max", "Max")])
def test_only_high_lowers_the_effort(template: ChatTemplate, effort: str, line: str) -> None:
    assert template.render(HELLO, None, reasoning_effort=effort).startswith(
        f"[gMASK]<sop><|system|>Reasoning Effort: {line}<|user|>hi"
    )
