"""Models, properties, slots, metrics, tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.client import EngineClient
from server.engine.messages import Counters, SlotState, SlotView, Snapshot
from tests.support.http import HELLO, Gate, generating, served
from tests.support.scripted import ScriptedBackend


async def test_models() -> None:
    async with served(model_tags=("moe",)) as s:
        body = (await s.http.get("/v1/models")).json()
        by_alias = (await s.http.get("/v1/models/alias")).json()
        unknown = await s.http.get("/v1/models/other")
    (model,) = body["data"]
    assert body["object"] == "list"
    assert body["models"][0]["name"] == "tiny"
    assert by_alias == model
    assert (model["id"], model["aliases"], model["tags"], model["owned_by"]) == (
        "tiny",
        ["tiny", "alias"],
        ["moe"],
        "llamacpp",
    )
    assert model["meta"] == {
        "vocab_type": 1,
        "n_vocab": 261,
        "n_ctx": 4096,
        "n_ctx_train": 4096,
        "n_embd": 8,
        "n_params": 1000,
        "size": 4000,
        "ftype": "F32",
    }
    assert unknown.status_code == 404
    assert unknown.json()["error"]["served"] == ["tiny", "alias"]


async def test_model_names_may_have_slashes() -> None:
    async with served(model_names=("zai-org/GLM-5.2",)) as s:
        assert (await s.http.get("/v1/models/zai-org/GLM-5.2")).json()["id"] == "zai-org/GLM-5.2"


async def test_the_context_of_one_request_is_the_same_everywhere() -> None:
    async with served(ScriptedBackend(n_ctx=400, n_slots=4, unified=False)) as s:
        model = (await s.http.get("/v1/models")).json()["data"][0]
        props = (await s.http.get("/props")).json()
        slots = (await s.http.get("/slots")).json()
        error = (await s.chat(messages=[{"role": "user", "content": "x" * 100}])).json()["error"]
    assert model["meta"]["n_ctx"] == model["max_model_len"] == props["default_generation_settings"]["n_ctx"] == 100
    assert {slot["n_ctx"] for slot in slots} == {100}
    assert error["n_ctx"] == 100


async def test_props() -> None:
    async with served(model_path="/models/tiny.gguf") as s:
        props = (await s.http.get("/props")).json()
    assert {
        key: props[key] for key in ("total_slots", "model_alias", "model_path", "bos_token", "eos_token", "build_info")
    } == {
        "total_slots": 4,
        "model_alias": "tiny",
        "model_path": "/models/tiny.gguf",
        "bos_token": "",
        "eos_token": "<|end|>",
        "build_info": "b0-scripted",
    }
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["chat_template"].startswith("{% for m in messages %}")
    assert (props["is_sleeping"], props["modalities"]["vision"], props["split_mode"]) == (False, False, "layer")


async def test_a_template_that_cannot_be_used_is_shown_all_the_same() -> None:
    async with served(ScriptedBackend(reply=lambda _: "x", chat_template="{% if %}")) as s:
        props = await s.http.get("/props")
        chat = await s.chat()
        raw = await s.post("/v1/completions", {"prompt": "x"})
    assert (props.status_code, props.json()["chat_template"]) == (200, "{% if %}")
    assert (chat.status_code, raw.status_code) == (501, 200)


@pytest.mark.parametrize(("props", "status"), [(True, 200), (False, 501)])
async def test_changing_props(props: bool, status: int) -> None:
    async with served(props=props) as s:
        assert (await s.post("/props", {})).status_code == status


async def test_slots_show_what_they_do_and_nothing_a_client_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(generating(1))
    async with served(ScriptedBackend(on_decode=gate)) as s:
        running = asyncio.create_task(s.chat(stop=["secret"], logit_bias={"65": 1}, max_tokens=10, seed=7))
        await gate.entered(s.engine)
        (job_id,) = s.engine.jobs
        views = [
            SlotView(0, SlotState.IDLE, 4096, n_kept=3),
            SlotView(1, SlotState.PREFILL, 4096, job_id, n_prompt=50, n_processed=30, n_cached=10),
            SlotView(2, SlotState.GENERATING, 4096, job_id, n_prompt=50, n_processed=50, n_decoded=4),
            SlotView(3, SlotState.GENERATING, 4096, job_id + 99),
        ]
        monkeypatch.setattr(EngineClient, "snapshot", Snapshot(views, 0, Counters(), 4096, 0, 0.0, 0.0))
        idle, reading, writing, just_ended = (await s.http.get("/slots")).json()
        gate.open()
        await running
    assert idle == {
        "id": 0,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": False,
        "state": "idle",
        "n_kept": 3,
    }
    assert (reading["is_processing"], reading["state"], reading["id_task"]) == (True, "prefill", job_id)
    counts = ("n_prompt_tokens", "n_prompt_tokens_cache", "n_prompt_tokens_processed")
    assert [reading[name] for name in counts] == [50, 10, 20]
    assert reading["next_token"] == [{"has_next_token": False, "n_remain": 10, "n_decoded": 0}]
    assert writing["next_token"] == [{"has_next_token": True, "n_remain": 6, "n_decoded": 4}]
    assert writing["params"]["seed"] == 7
    assert "secret" not in str(writing)
    assert "logit_bias" not in writing["params"]
    assert just_ended["params"] == {}


async def test_no_free_slot_can_be_a_503() -> None:
    gate = Gate(generating(1))
    async with served(ScriptedBackend(n_slots=1, on_decode=gate)) as s:
        free = await s.http.get("/slots?fail_on_no_slot=1")
        running = asyncio.create_task(s.chat(max_tokens=5))
        await gate.entered(s.engine)
        taken = await s.http.get("/slots?fail_on_no_slot=1")
        asked_nothing = await s.http.get("/slots")
        gate.open()
        await running
    assert (free.status_code, taken.status_code, asked_nothing.status_code) == (200, 503, 200)
    assert taken.json()["error"]["message"] == "no slot available"


@pytest.mark.parametrize("route", ["slots", "metrics"])
async def test_what_is_off_says_how_to_turn_it_on(route: str) -> None:
    off: dict[str, Any] = {route: False}
    async with served(**off) as s:
        response = await s.http.get(f"/{route}")
    assert response.status_code == 501
    assert f"--{route}" in response.json()["error"]["message"]


async def test_metrics_agree_with_what_the_answers_said() -> None:
    async with served() as s:
        usages = [(await s.chat()).json()["usage"] for _ in range(3)]
        await s.chat(temperature="hot")
        response = await s.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.headers["process-start-time-unix"].isdecimal()
    series = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert series[("llamacpp:tokens_predicted_total",)] == sum(usage["completion_tokens"] for usage in usages)
    assert series[("llamacpp:prompt_tokens_cached_total",)] == cached
    assert series[("llamacpp:prompt_tokens_total",)] == sum(usage["prompt_tokens"] for usage in usages) - cached
    assert series[("glmserve_http_requests_total", "/v1/chat/completions", "200")] == 3
    assert series[("glmserve_http_requests_total", "/v1/chat/completions", "400")] == 1
    assert series[("glmserve_time_to_first_token_seconds_count",)] == 3
    assert series[("glmserve_inter_token_seconds_count",)] == 3 * 6


async def test_tokenize_and_back() -> None:
    async with served() as s:
        plain = (await s.post("/tokenize", {"content": "aö<think>"})).json()
        literal = (await s.post("/tokenize", {"content": "<think>", "parse_special": False})).json()
        pieces = (await s.post("/tokenize", {"content": ["aö", 257], "with_pieces": True})).json()
        text = (await s.post("/detokenize", {"tokens": plain["tokens"]})).json()
        nothing = (await s.post("/detokenize", {"tokens": []})).json()
        wrong = await s.post("/detokenize", {"tokens": [999]})
    assert plain == {"tokens": [97, 195, 182, 259]}
    assert literal == {"tokens": list(b"<think>")}
    assert pieces["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 182, "piece": [182]},
        {"id": 257, "piece": "<|user|>"},
    ]
    assert text == {"content": "aö<think>"}
    assert nothing == {"content": ""}
    assert wrong.status_code == 400
    assert "token 999 is not in the vocabulary" in wrong.json()["error"]["message"]


async def test_state_is_told_while_the_engine_is_deep_in_a_step() -> None:
    gate = Gate()
    async with served(ScriptedBackend(reply=lambda _: "x", on_decode=gate)) as s:
        running = asyncio.create_task(s.chat())
        await gate.entered(s.engine)
        for path in ("/health", "/slots", "/metrics", "/props", "/v1/models"):
            assert (await s.http.get(path)).status_code == 200, path
        assert (await s.post("/tokenize", {"content": "x"})).status_code == 200
        assert (await s.post("/v1/chat/completions/input_tokens", {"messages": HELLO})).status_code == 200
        gate.open()
        assert (await running).status_code == 200
