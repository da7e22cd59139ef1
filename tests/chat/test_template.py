from __future__ import annotations

import re
from typing import Any

import pytest

from server.chat.messages import Conversation, Message, PromptSpan, Tool, ToolCall
from server.chat.template import CHATML, ChatTemplate
from server.errors import ConfigError, InvalidRequest

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def template(source: str = CHATML, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, name="the test template", **options)


def user(text: str) -> Message:
    return Message("user", text)


def chat(*messages: Message, **fields: Any) -> Conversation:
    return Conversation(messages, **fields)


def text_of(source: str, *messages: Message, **fields: Any) -> str:
    return template(source).render(chat(*messages, **fields)).text


# ── what templates are given ─────────────────────────────────────────────────────────────────────────────────────────


def test_chatml_fallback_writes_turns_and_the_generation_prompt() -> None:
    prompt = template().render(chat(Message("system", "Be brief."), user("Hi")))
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.spans == (PromptSpan(prompt.text, literal=False),)


def test_without_generation_prompt() -> None:
    assert text_of(CHATML, user("Hi"), add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_null_content_is_empty_text() -> None:
    assert text_of(PLAIN, Message("assistant", None), user("x")) == "[assistant][user]x"


def test_only_keys_that_were_given_are_seen() -> None:
    source = "{% for m in messages %}{{ m.keys() | list | sort | join(',') }};{% endfor %}"
    full = Message("tool", "r", reasoning="t", tool_calls=(ToolCall("1", "f", "{}"),), tool_call_id="1", name="f")
    assert text_of(source, user("x"), full) == (
        "content,role;content,name,reasoning_content,role,tool_call_id,tool_calls;"
    )


def test_tools_are_printed_as_the_client_wrote_them() -> None:
    wire = {"type": "function", "function": {"name": "f", "description": "größe", "parameters": {"b": 1, "a": 2}}}
    tool = Tool("f", {"b": 1, "a": 2}, wire)
    assert text_of("{{ tools[0] | tojson }}", user("x"), tools=(tool,)) == (
        '{"type": "function", "function": {"name": "f", "description": "größe", "parameters": {"b": 1, "a": 2}}}'
    )
    assert text_of("{{ tools is none }}", user("x")) == "True"


@pytest.mark.parametrize(
    ("arguments", "walked", "printed"),
    [
        ('{"city": "Köln", "n": 2}', "city=Köln;n=2;", '{"city": "Köln", "n": 2}'),
        ("", "", "{}"),
        ("  ", "", "{}"),
        ("not json", "raw_arguments=not json;", '{"raw_arguments": "not json"}'),
        ("[1]", "raw_arguments=[1];", '{"raw_arguments": "[1]"}'),
        ("[" * 100_000, "raw_arguments=" + "[" * 100_000 + ";", None),
    ],
)
def test_arguments_can_be_walked_and_printed(arguments: str, walked: str, printed: str | None) -> None:
    message = Message("assistant", None, tool_calls=(ToolCall("1", "f", arguments),))
    walk = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    assert text_of(walk, message, user("x")) == walked
    if printed is not None:
        assert text_of("{{ messages[0].tool_calls[0].function.arguments }}", message, user("x")) == printed
        assert text_of("{{ messages[0].tool_calls[0].function.arguments | tojson }}", message, user("x")) == printed


def test_half_a_surrogate_pair_in_arguments_becomes_a_replacement_character() -> None:
    message = Message("assistant", None, tool_calls=(ToolCall("1", "f", '{"a": "\\ud83d"}'),))
    assert text_of("{{ messages[0].tool_calls[0].function.arguments.a }}", message, user("x")) == "\ufffd"


def test_kwargs_reach_the_template_over_the_defaults() -> None:
    made = template("{{ a }}{{ b }}{{ bos_token }}", bos_text="<s>", default_kwargs={"a": 1, "b": 2})
    assert made.render(chat(user("x"), template_kwargs={"b": 3})).text == "13<s>"


def test_kwargs_cannot_replace_the_messages() -> None:
    assert text_of(PLAIN, user("x"), template_kwargs={"messages": []}) == "[user]x"


def test_helpers_of_published_templates() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", text_of("{{ strftime_now('%Y-%m') }}", user("x")))
    assert text_of("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", user("x")) == "1"
    assert text_of("{% generation %}{{ messages[0].content }}{% endgeneration %}!", user("x")) == "x!"
    assert text_of("{{ {'b': 'ä', 'a': [1]} | tojson(indent=1) }}", user("x")) == ('{\n "b": "ä",\n "a": [\n  1\n ]\n}')


def test_blocks_are_trimmed() -> None:
    assert text_of("  {% if true %}\nx\n  {% endif %}\ny", user("x")) == "x\ny"


def test_the_sandbox_holds() -> None:
    with pytest.raises(InvalidRequest, match="SecurityError"):
        text_of("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", user("x"))
    with pytest.raises(InvalidRequest, match="SecurityError"):
        text_of("{{ messages.append(1) }}", user("x"))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_raise_exception_is_quoted() -> None:
    with pytest.raises(InvalidRequest, match="the test template refuses these messages: roles must alternate"):
        text_of("{{ raise_exception('roles must alternate') }}", user("x"))


def test_a_template_that_trips_is_told() -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages: UndefinedError"):
        text_of("{{ messages[0].nothing.at.all }}", user("x"))


def test_a_syntax_error_names_template_and_line() -> None:
    with pytest.raises(ConfigError, match=r"the test template is not valid Jinja: .*line 2"):
        template("fine\n{% if %}")


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        text_of(PLAIN)


# ── continuing an assistant turn ─────────────────────────────────────────────────────────────────────────────────────

THINKING = PLAIN + "{% if add_generation_prompt %}[a]<think>{% endif %}"


@pytest.mark.parametrize(
    ("source", "final", "tail", "opens"),
    [
        (CHATML, Message("assistant", "The sky is"), "<|im_start|>assistant\nThe sky is", False),
        (CHATML, Message("assistant", None), "<|im_start|>assistant\n", False),
        (CHATML, Message("assistant", "", reasoning="Hm"), "<|im_start|>assistant\n<think>Hm", True),
        (THINKING, Message("assistant", "Blue", reasoning="Hm"), "[a]<think>Hm</think>Blue", False),
        (THINKING, Message("assistant", "Blue"), "[a]<think></think>Blue", False),
        (THINKING, Message("assistant", None, reasoning="Hm"), "[a]<think>Hm", True),
    ],
)
def test_the_final_turn_follows_the_generation_prompt(source: str, final: Message, tail: str, opens: bool) -> None:
    prompt = template(source).render(chat(user("x"), final, continue_final_message=True, add_generation_prompt=False))
    assert prompt.text.endswith(tail)
    assert prompt.opens_in_reasoning is opens


def test_the_tail_tells_whether_reasoning_is_open() -> None:
    assert template(THINKING).render(chat(user("x"))).opens_in_reasoning
    assert not template(CHATML).render(chat(user("what does <think> do?"))).opens_in_reasoning


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((user("x"),), "only a final assistant message"),
        (
            (user("x"), Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))),
            "only a final assistant message",
        ),
        ((Message("assistant", "a"), Message("assistant", "b")), "two assistant messages"),
    ],
)
def test_what_cannot_be_continued(messages: tuple[Message, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        template().render(chat(*messages, continue_final_message=True))
