"""Bodies: what is accepted, what it becomes, and what a refusal says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.api.options import GenerationDefaults
from server.api.schemas.chat import ChatRequest
from server.api.schemas.completion import CompletionRequest
from server.api.schemas.fields import INT32_MAX, Body, first_problem
from server.api.schemas.text import TokenizeRequest
from server.engine.messages import SamplingOptions
from server.errors import InvalidRequest
from server.service import GenerationOptions

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def read(model: type[Body], body: Any) -> Body | InvalidRequest:
    """As body.py does it."""
    try:
        return model.model_validate(body)
    except InvalidRequest as error:
        return error
    except ValidationError as error:
        return first_problem(error)


def problem(model: type[Body], body: Any) -> InvalidRequest:
    made = read(model, body)
    assert isinstance(made, InvalidRequest), f"accepted: {body}"
    return made


def options(defaults: Any = None, **fields: Any) -> GenerationOptions:
    request = CompletionRequest.model_validate({"prompt": "x"} | fields)
    return request.generation_options(defaults or GenerationDefaults(), request.n_logprobs)


# ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_says_nothing_gets_the_defaults() -> None:
    defaults = GenerationDefaults(
        SamplingOptions(temperature=0.1, grammar="root ::= x"), max_tokens=9, cache_prompt=False
    )
    made = options(defaults)
    assert made == GenerationOptions(defaults.sampling, max_tokens=9, cache_prompt=False)


ALL_NUMBERS: dict[str, Any] = {
    "seed": 42,
    "temperature": 0.5,
    "dynatemp_range": 0.25,
    "dynatemp_exponent": 2.0,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "typical_p": 0.75,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "min_keep": 2,
    "repeat_penalty": 1.5,
    "repeat_last_n": 32,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "dry_multiplier": 0.5,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.25,
    "adaptive_target": 0.5,
    "adaptive_decay": 0.5,
}


def test_every_sampling_field_arrives_under_its_own_name() -> None:
    lists = {"dry_sequence_breakers": ["."], "samplers": ["top_k"], "logit_bias": [[5, 1]]}
    made = options(**ALL_NUMBERS, **lists, ignore_eos=True, grammar="root ::= x")
    expected = ALL_NUMBERS | {"dry_sequence_breakers": (".",), "samplers": ("top_k",), "logit_bias": ((5, 1.0),)}
    assert made.sampling == SamplingOptions(**expected, ignore_eos=True, grammar="root ::= x")
    assert set(expected) | {"ignore_eos", "grammar"} == set(SamplingOptions.__struct_fields__), "a field is untested"


def test_null_means_absent() -> None:
    nothing = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})
    assert options(**nothing) == options()


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5.0}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7}, 7),
        ({"n_predict": -1}, -1),
        ({"max_tokens": 0}, 0),
    ],
)
def test_names_of_the_token_limit(fields: dict[str, Any], limit: int) -> None:
    assert options(GenerationDefaults(max_tokens=99), **fields).max_tokens == limit


@pytest.mark.parametrize(
    ("field", "value", "clamped"),
    [
        ("top_k", -1, 0),
        ("top_k", 2**40, INT32_MAX),
        ("top_p", 1.5, 1.0),
        ("min_p", -1, 0.0),
        ("temperature", -2, 0.0),
        ("xtc_threshold", 7, 1.0),
        ("mirostat", 9, 2),
        ("adaptive_target", 3, 1.0),
        ("dry_base", 0.5, 1.75),
        ("seed", -1, -1),
        ("seed", 2**32 + 5, 5),
        ("seed", -2, 2**32 - 2),
    ],
)
def test_soft_limits_clamp(field: str, value: float, clamped: float) -> None:
    assert getattr(options(**{field: value}).sampling, field) == clamped


def test_other_names() -> None:
    made = options(n_cmpl=2, repetition_penalty=1.5, t_max_predict_ms=10, id_slot=-1)
    assert (made.n, made.sampling.repeat_penalty, made.time_limit_ms, made.slot) == (2, 1.5, 10.0, None)
    assert options(t_max_predict_ms=-1).time_limit_ms is None
    assert options(id_slot=3).slot == 3


@pytest.mark.parametrize(
    ("value", "stops"),
    [("a", ("a",)), (["a", "", "b"], ("a", "b")), ("", ()), ([], ()), (None, ())],
)
def test_stop_forms(value: Any, stops: tuple[str, ...]) -> None:
    assert options(stop=value).stop == stops


@pytest.mark.parametrize(
    ("value", "tokens", "texts"),
    [
        ({"5": 1, "-7": 2, "ab": False}, ((5, 1.0),), (("-7", 2.0), ("ab", -math.inf))),
        ([[5, 1], [6.0, -2.5], ["5", 3], [7, False]], ((5, 1.0), (6, -2.5), (7, -math.inf)), (("5", 3.0),)),
        ({}, (), ()),
        (None, (), ()),
    ],
)
def test_logit_bias_forms(value: Any, tokens: tuple[Any, ...], texts: tuple[Any, ...]) -> None:
    made = options(logit_bias=value)
    assert (made.sampling.logit_bias, made.text_bias) == (tokens, texts)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("kpt", ("top_k", "top_p", "temperature")),
        (
            ["top-k", "TopP", "nucleus", "typical_p", "temp", "minp"],
            ("top_k", "top_p", "typ_p", "temperature", "min_p"),
        ),
        ("", ()),
        ([], ()),
    ],
)
def test_sampler_forms(value: Any, names: tuple[str, ...]) -> None:
    assert options(samplers=value).sampling.samplers == names


def test_progress_is_for_streams() -> None:
    assert options(return_progress=True, stream=True).report_progress
    assert not options(return_progress=True).report_progress


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "must be a valid number, but got 'hot'"),
        ("temperature", True, "must be a valid number, but got True"),
        ("temperature", 10**400, "must be a valid number"),
        ("presence_penalty", 1e39, "must be less than or equal to 34"),
        ("top_k", 1.5, "must be a valid integer"),
        ("top_k", 2**64, "must be less than or equal to"),
        ("stream", "true", "must be a valid boolean, but got 'true'"),
        ("stream", 1, "must be a valid boolean, but got 1"),
        ("max_tokens", -2, "must be greater than or equal to -1, but got -2"),
        ("n", 0, "must be greater than or equal to 1, but got 0"),
        ("n", 129, "must be less than or equal to 128"),
        ("adaptive_decay", 1, "must be less than or equal to 0.99"),
        ("min_keep", -1, "must be greater than or equal to 0"),
        ("repeat_last_n", -2, "must be greater than or equal to -1"),
        ("stop", 5, "must be a text or a list of texts, but got 5"),
        ("stop", ["a", 5], "must be a text or a list of texts"),
        ("samplers", ["top_k", "foo"], "there is no sampler 'foo'; known are penalties, dry"),
        ("samplers", "kz", "there is no sampler 'z'; known are e (penalties)"),
        ("samplers", 5, "must be a list of names or a text of letters"),
        ("logit_bias", 5, "must be an object or a list of pairs"),
        ("logit_bias", [[1]], "must be made of [token, bias] pairs, but got [1]"),
        ("logit_bias", [[1, True]], "a bias is a number, or false to ban the token, but got True"),
        ("logit_bias", [[1, 1e300]], "a bias is a number"),
        ("logit_bias", [[None, 1]], "a token is given by its id or its text, but got None"),
        ("logit_bias", [[2**40, 1]], "a token is given by its id or its text"),
        ("dry_sequence_breakers", [], "must be a list of at least one text"),
        ("dry_sequence_breakers", ["."] * 33, "must be at most 32 texts of at most 40 characters"),
        ("dry_sequence_breakers", ["x" * 41], "must be at most 32 texts of at most 40 characters"),
        ("grammar", ["x"], "must be a valid string"),
        ("json_schema", [], "must be a JSON schema, which is an object, but got []"),
        ("guided_json", "{", "must be a JSON schema, but is not JSON"),
        ("choice", [], "must be a list of at least one text, none empty"),
        ("guided_choice", ["a", ""], "must be a list of at least one text, none empty"),
        ("choice", ["a"] * 10_001, "must be at most 10000 texts, but got 10001"),
        ("response_format", {"type": "xml"}, "type must be text, json_object or json_schema, but got 'xml'"),
        ("response_format", {"type": "json_schema"}, "type json_schema needs 'json_schema' with a 'schema' in it"),
        ("lora", [{"id": 0}], "LoRA adapters are not supported"),
        ("best_of", 2, "use 'n'"),
        ("suffix", "x", "is not supported"),
        ("min_tokens", 5, "is not supported"),
        ("stop_token_ids", [1], "use 'stop' with texts"),
        ("reasoning_budget_tokens", 0, "is for chats"),
        ("response_fields", ["content"], "the whole answer is always sent"),
        ("stream_options", {"include_usage": "yes"}, "must be a valid boolean"),
        ("logprobs", True, "must be a valid integer"),
        ("prompt", [], "must be a text, a list of token ids, or a list of those, but got []"),
        ("prompt", [True], "must be made of texts, token ids or lists of those, but got True"),
        ("prompt", [[]], "must be made of texts, token ids or lists of those, but got []"),
        ("prompt", [[1, [2]]], "must be made of texts and token ids, but got [2]"),
        ("prompt", [2**40], "must be made of texts"),
        ("prompt", None, "must be a text"),
    ],
)
def test_refusals_name_field_rule_and_value(field: str, value: Any, words: str) -> None:
    error = problem(CompletionRequest, {"prompt": "x"} | {field: value})
    assert error.message.startswith(f"Field '{field}"), error.message
    assert words in error.message
    assert error.param is not None
    assert error.param.startswith(field)


def test_what_asks_for_nothing_is_no_reason_to_refuse() -> None:
    nothing = {
        "best_of": 1,
        "suffix": "",
        "lora": [],
        "min_tokens": 0,
        "json_schema": None,
        "reasoning_budget_tokens": -1,
    }
    assert options(**nothing) == options()


def test_fields_that_contradict_each_other() -> None:
    assert "leave one of them out" in problem(CompletionRequest, {"prompt": "x", "n": 2, "id_slot": 0}).message
    assert (
        "together with 'logprobs'" in problem(CompletionRequest, {"prompt": "x", "echo": True, "logprobs": 1}).message
    )


def test_unknown_fields_are_ignored() -> None:
    known = options(user="me", metadata={"a": 1}, store=True, service_tier="auto", foo=[1])
    assert known == options()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "json_schema", "functions"})


@given(st.dictionaries(st.sampled_from(FIELDS), json_values), st.sampled_from([ChatRequest, CompletionRequest]))
def test_property_any_json_is_taken_or_refused_with_a_sentence(body: dict[str, Any], model: type[Body]) -> None:
    base = {"messages": [USER]} if model is ChatRequest else {"prompt": "x"}
    made = read(model, base | body)
    if isinstance(made, InvalidRequest):
        assert made.message.startswith("Field '")
        return
    assert isinstance(made, ChatRequest | CompletionRequest)
    made.generation_options(GenerationDefaults(), made.n_logprobs)
    if isinstance(made, ChatRequest):
        made.conversation()


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER]} | fields)


def test_messages_keep_what_templates_need() -> None:
    messages = [
        {"role": "user", "content": "a", "name": "bob"},
        {"role": "assistant", "content": None, "reasoning": "r", "refusal": None},
        {"role": "assistant", "reasoning_content": "c", "reasoning": "ignored"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"ä": 1}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": ["p", {"type": "input_text", "text": "q"}]},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    got = chat(messages=messages).conversation().messages
    assert [(m.role, m.content, m.reasoning, m.name, m.tool_call_id) for m in got] == [
        ("user", "a", None, "bob", None),
        ("assistant", None, "r", None, None),
        ("assistant", None, "c", None, None),
        ("assistant", None, None, None, None),
        ("tool", "p\nq", None, None, "1"),
        ("user", "no", None, None, None),
    ]
    assert [(call.id, call.name, call.arguments) for call in got[3].tool_calls] == [("1", "f", '{"ä": 1}')]


def test_a_tool_is_kept_as_it_was_sent() -> None:
    (tool,) = chat(tools=[TOOL | {"extra": None}]).conversation().tools
    assert (tool.name, tool.parameters, tool.wire) == ("f", {"type": "object"}, TOOL | {"extra": None})


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({}, None),
        ({"logprobs": True}, 20),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"n_probs": 3}, 3),
        ({"n_probs": 0}, None),
        ({"logprobs": False}, None),
    ],
)
def test_how_many_log_probabilities(fields: dict[str, Any], n: int | None) -> None:
    assert chat(**fields).n_logprobs == n


def allowed_tools(**allowed: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": allowed}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "Field 'messages': must have at least 1 item"),
        ({"messages": "hi"}, "Field 'messages': must be a valid list"),
        ({"messages": [{"role": "user"}]}, "Field 'messages[0]': a message needs 'content'"),
        ({"messages": [{"content": "x"}]}, "Field 'messages[0].role': is required"),
        ({"messages": [{"role": "a b", "content": "x"}]}, "Field 'messages[0].role': "),
        ({"messages": [USER, 5]}, "Field 'messages[1]': must be an object, but got 5"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "Field 'messages[0].content': must be a text or a list of parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "Field 'messages[0].content': parts of type 'image_url' are not supported; this server reads text only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part of type 'text' must have a text"),
        ({"messages": [{"role": "user", "content": [5]}]}, "a part must be an object with a type, but got 5"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}
                ]
            },
            "Field 'messages[0].tool_calls[0].function.arguments': must be a valid string, but got 5",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "Field 'messages[0]': 'function_call' is long deprecated",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}] * 2}, "two assistant messages stand at the end"),
        ({"tools": [5]}, "Field 'tools[0]': must be an object, but got 5"),
        ({"tools": {}}, "Field 'tools': must be a list of tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "Field 'tools[0].function.name': is required"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "Field 'tools[0].type': must be 'function'"),
        ({"tool_choice": "required"}, "Field 'tool_choice': needs 'tools' to choose from"),
        (
            {"tools": [TOOL], "tool_choice": "yes"},
            "must be auto, none, required, a function by its name, or allowed_tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "Field 'tool_choice': there is no tool 'other' in 'tools', which has: f",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [TOOL]}},
            },
            "Field 'tool_choice.allowed_tools.mode': must be auto or required",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed_tools(tools=[])},
            "Field 'tool_choice.allowed_tools.tools': must be a list of at least one tool",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function"}]}},
            },
            "Field 'tool_choice.allowed_tools.tools[0]': must name a function",
        ),
        ({"regex": "a", "choice": ["b"]}, "Field 'choice': is not supported together with 'regex'"),
        ({"grammar": "root ::= x", "guided_json": {}}, "Field 'guided_json': is not supported together with 'grammar'"),
        (
            {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True},
            "Field 'tool_choice': cannot force calls together with 'ignore_eos'",
        ),
        ({"regex": "a", "ignore_eos": True}, "Field 'regex': is not supported together with 'ignore_eos'"),
        ({"structured_outputs": {"structural_tag": {}}}, "Field 'structured_outputs.structural_tag': is not supported"),
        ({"tools": [TOOL], "grammar": "root ::= x"}, "Field 'grammar': is not supported together with 'tools'"),
        ({"tools": [TOOL], "logprobs": True, "stream": True}, "not supported together with 'tools' and 'stream'"),
        ({"top_logprobs": 2}, "Field 'top_logprobs': needs 'logprobs' to be true"),
        ({"logprobs": True, "top_logprobs": 300}, "Field 'top_logprobs': must be less than or equal to 256"),
        ({"functions": [{}]}, "Field 'functions': is long deprecated"),
        ({"modalities": ["text", "audio"]}, "only text can be generated"),
        ({"chat_template": "x"}, "--chat-template"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "must be true or false, not a text"),
        ({"chat_template_kwargs": []}, "Field 'chat_template_kwargs': must be an object"),
        ({"thinking": {"budget_tokens": -5}}, "Field 'thinking.budget_tokens'"),
        (
            {"reasoning_format": "foo"},
            "Field 'reasoning_format': must be 'auto', 'none', 'deepseek' or 'deepseek-legacy'",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "cannot be true together with 'add_generation_prompt'",
        ),
    ],
)
def test_chat_refusals(fields: dict[str, Any], words: str) -> None:
    assert words in problem(ChatRequest, {"messages": [USER]} | fields).message


def test_harmless_values_of_unsupported_fields_pass() -> None:
    chat(response_format={"type": "text"}, modalities=["text"], function_call="auto", functions=[], audio=None)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokenize_content() -> None:
    assert TokenizeRequest.model_validate({"content": "a"}).content == ("a",)
    assert TokenizeRequest.model_validate({"content": ["a", "b"]}).content == ("a", "b")
    assert TokenizeRequest.model_validate({"content": ["a", 1, 2]}).content == ("a", (1, 2))
    assert "lists cannot be nested" in problem(TokenizeRequest, {"content": ["a", [1]]}).message
    assert "must be a text" in problem(TokenizeRequest, {"content": 5}).message
