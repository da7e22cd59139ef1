"""POST /v1/completions and llama.cpp's own /completion."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http import served
from tests.support.scripted import ScriptedBackend


async def test_whole_completion() -> None:
    async with served() as s:
        body = (await s.post("/v1/completions", {"model": "tiny", "prompt": "ab"})).json()
    assert body["id"].startswith("cmpl-")
    assert {key: body[key] for key in ("object", "model", "choices")} == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "<ab>", "logprobs": None, "finish_reason": "stop"}],
    }
    assert body["usage"]["total_tokens"] == 7
    assert body["timings"]["prompt_n"] == 2


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["<ab>"]),
        ([97, 98.0], ["<ab>"]),
        (["a", "b"], ["<a>", "<b>"]),
        ([[97], [98, 99]], ["<a>", "<bc>"]),
        ([97, "bc", 100], ["<abcd>"]),
        (["a", [98, "c"]], ["<a>", "<bc>"]),
    ],
)
async def test_prompt_forms(prompt: Any, texts: list[str]) -> None:
    async with served() as s:
        once = (await s.post("/v1/completions", {"prompt": prompt})).json()
        twice = (await s.post("/v1/completions", {"prompt": prompt, "n": 2})).json()
    assert [choice["text"] for choice in once["choices"]] == texts
    assert [choice["text"] for choice in twice["choices"]] == [text for text in texts for _ in range(2)]
    assert [choice["index"] for choice in twice["choices"]] == list(range(2 * len(texts)))
    assert twice["usage"]["prompt_tokens"] == once["usage"]["prompt_tokens"]


async def test_completion_stream() -> None:
    async with served() as s:
        frames = await s.chunks("/v1/completions", prompt="ab", stream_options={"include_usage": True}, echo=True)
    *others, last = frames.data
    assert frames.done
    assert "".join(chunk["choices"][0]["text"] for chunk in others) == "ab<ab>"
    assert [c["choices"][0]["finish_reason"] for c in others if c["choices"][0]["finish_reason"]] == ["stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


async def test_echo_reads_token_prompts_back() -> None:
    async with served() as s:
        body = (await s.post("/v1/completions", {"prompt": [[97], [98, 257]], "echo": True})).json()
    assert [choice["text"] for choice in body["choices"]] == [
        "a<a>",
        "b<|user|><b>",
    ]  # the answer repeats the control token, which is not text


async def test_log_probabilities_in_both_forms() -> None:
    async with served() as s:
        body = (await s.post("/v1/completions", {"prompt": "ab", "logprobs": 2, "max_tokens": 2})).json()
        chosen = (await s.post("/v1/completions", {"prompt": "ab", "logprobs": 0, "max_tokens": 2})).json()
        frames = await s.chunks("/v1/completions", prompt="ab", logprobs=1, max_tokens=2)
    shown = body["choices"][0]["logprobs"]
    assert (shown["tokens"], shown["token_logprobs"], shown["text_offset"]) == (["<", "a"], [-0.25, -0.25], [0, 1])
    assert shown["top_logprobs"] == [{"<": -0.25, "A": -2.0}, {"a": -0.25, "A": -2.0}]
    assert [entry["id"] for entry in shown["content"]] == [60, 97]
    assert chosen["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}]
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in frames.data if c["choices"][0]["logprobs"]]
    assert offsets == [[0], [1]]


# ── llama.cpp's own form ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_native_completion(path: str) -> None:
    fields = {"prompt": "ab", "n_predict": 3, "seed": 42, "return_tokens": True, "stop": ["zz"]}
    async with served() as s:
        body = (await s.post(path, fields)).json()
    settings = body.pop("generation_settings")
    assert (settings["seed"], settings["n_predict"], settings["max_tokens"], settings["stop"]) == (42, 3, 3, ["zz"])
    assert body.pop("timings")["predicted_n"] == 3
    assert body == {
        "index": 0,
        "content": "<ab",
        "tokens": [60, 97, 98],
        "id_slot": 0,
        "stop": True,
        "model": "tiny",
        "tokens_predicted": 3,
        "tokens_evaluated": 2,
        "prompt": "ab",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 4,
    }


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, ("eos", "", "<a\n>", True)),
        ({"stop": ["\n"]}, ("word", "\n", "<a", False)),
        ({"max_tokens": 1}, ("limit", "", "<", False)),
    ],
)
async def test_native_ends(fields: dict[str, Any], ends: tuple[str, str, str, bool]) -> None:
    async with served() as s:
        body = (await s.post("/completion", {"prompt": "a\n"} | fields)).json()
        frames = await s.chunks("/completion", prompt="a\n", **fields)
    assert (body["stop_type"], body["stopping_word"], body["content"], body["has_new_line"]) == ends
    *parts, final = frames.data
    assert not frames.done, "these streams have no [DONE]"
    assert "".join(part["content"] for part in parts) == body["content"]
    assert all(part["stop"] is False for part in parts)
    assert (final["stop"], final["stop_type"], final["has_new_line"], final["content"]) == (True, ends[0], ends[3], "")


async def test_native_truncation_is_told() -> None:
    async with served(ScriptedBackend(n_ctx=16)) as s:
        body = (await s.post("/completion", {"prompt": "abcdefgh"})).json()
    assert (body["truncated"], body["stop_type"]) == (True, "limit")


async def test_native_probabilities_and_several_choices() -> None:
    async with served() as s:
        body = (await s.post("/completion", {"prompt": "a", "n_probs": 1, "n_predict": 1})).json()
        post = (
            await s.post("/completion", {"prompt": "a", "n_probs": 1, "n_predict": 1, "post_sampling_probs": True})
        ).json()
        other_name = (await s.post("/completion", {"prompt": "a", "logprobs": 1, "n_predict": 1})).json()
        many = (await s.post("/completion", {"prompt": [[97], [98]]})).json()
        frames = await s.chunks("/completion", prompt="a", n_probs=1, n_predict=1, timings_per_token=True)
    assert body["completion_probabilities"][0]["top_logprobs"][0]["id"] == 60
    assert other_name["completion_probabilities"] == body["completion_probabilities"]
    assert set(post["completion_probabilities"][0]) == {"id", "token", "bytes", "prob", "top_probs"}
    assert [(choice["index"], choice["content"], choice["prompt"]) for choice in many] == [
        (0, "<a>", "a"),
        (1, "<b>", "b"),
    ]
    assert frames.data[0]["completion_probabilities"] == body["completion_probabilities"]
    assert frames.data[0]["timings"]["predicted_n"] == 1


async def test_native_progress() -> None:
    async with served() as s:
        frames = await s.chunks("/completion", prompt="ab", return_progress=True)
        text = await s.chunks("/v1/completions", prompt="cd", return_progress=True)
    assert [c["prompt_progress"]["processed"] for c in frames.data if "prompt_progress" in c] == [0, 2]
    assert [c["prompt_progress"]["processed"] for c in text.data if "prompt_progress" in c] == [0, 2]
