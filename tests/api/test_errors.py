"""What an error looks like on the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server import errors
from server.api.errors import MethodNotAllowed, TimedOut, error_body, error_headers, error_response, status_and_type
from server.api.options import ModelNames
from server.engine.client import EngineState, EngineStatus
from server.engine.options import SchedulerOptions
from tests.support.http import HELLO, Gate, assert_idle, frames_of, generating, served
from tests.support.scripted import ScriptedBackend

CASES: list[tuple[errors.GlmserveError, int, str, dict[str, str], dict[str, Any]]] = [
    (errors.InvalidRequest("m", param="p"), 400, "invalid_request_error", {}, {"param": "p"}),
    (errors.ContextTooLong(9, 8), 400, "exceed_context_size_error", {}, {"n_prompt_tokens": 9, "n_ctx": 8}),
    (errors.Unauthorized("m"), 401, "authentication_error", {"WWW-Authenticate": "Bearer"}, {}),
    (errors.Forbidden("m"), 403, "permission_error", {}, {}),
    (errors.NotFound("m"), 404, "not_found_error", {}, {}),
    (errors.ModelNotFound("x", ("a", "b")), 404, "not_found_error", {}, {"param": "model", "served": ("a", "b")}),
    (MethodNotAllowed("m", ("GET", "POST")), 405, "invalid_request_error", {"Allow": "GET, POST"}, {}),
    (errors.Conflict("m"), 409, "invalid_request_error", {}, {}),
    (errors.BodyTooLarge("m"), 413, "invalid_request_error", {}, {}),
    (errors.QueueFull("m", retry_after_s=7), 429, "rate_limit_error", {"Retry-After": "7"}, {"retry_after": 7}),
    (errors.EngineFailure("m"), 500, "server_error", {}, {}),
    (errors.GlmserveError("m"), 500, "server_error", {}, {}),
    (errors.NotSupported("m"), 501, "not_supported_error", {}, {}),
    (
        errors.Unavailable("m", retry_after_s=3, progress=0.5),
        503,
        "unavailable_error",
        {"Retry-After": "3"},
        {"retry_after": 3, "progress": 0.5},
    ),
    (errors.QueueTimeout("m", retry_after_s=9), 503, "unavailable_error", {"Retry-After": "9"}, {"retry_after": 9}),
    (TimedOut("m"), 504, "timeout_error", {}, {}),
]


@pytest.mark.parametrize(("error", "status", "kind", "headers", "extra"), CASES)
def test_each_error_has_status_type_reason_and_headers(
    error: errors.GlmserveError, status: int, kind: str, headers: dict[str, str], extra: dict[str, Any]
) -> None:
    assert status_and_type(error) == (status, kind)
    assert error_headers(error) == headers
    inner = {"code": status, "message": error.message, "type": kind, "reason": error.code}
    assert error_body(error) == {"error": inner | extra}
    assert error_response(error).status_code == status


def test_every_request_error_has_a_case() -> None:
    def family(kind: type[errors.GlmserveError]) -> set[type]:
        return {kind}.union(*(family(child) for child in kind.__subclasses__()))

    shown = {type(error) for error, *_ in CASES}
    assert family(errors.RequestError) - {errors.RequestError} <= shown


# ── before the 200 ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_prompt_is_refused_before_a_stream_opens(stream: bool) -> None:
    async with served(ScriptedBackend(n_ctx=64)) as s:
        response = await s.chat(messages=[{"role": "user", "content": "x" * 64}], stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["reason"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (64, 64)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_grammar_is_refused_before_a_stream_opens(stream: bool) -> None:
    async with served() as s:
        response = await s.chat(grammar="bad", stream=stream)
        good = await s.chat(grammar="root ::= x", stream=stream)
        await assert_idle(s.engine)
    assert response.status_code == 400
    assert "expecting ::= at bad" in response.json()["error"]["message"]
    assert good.status_code == 200
    assert "hello" in good.text or frames_of(good.text).text == "<hello>"


async def test_a_full_queue_is_429_at_once() -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", n_slots=1, on_decode=gate)
    async with served(backend, scheduler=SchedulerOptions(max_waiting=0)) as s:
        running = asyncio.create_task(s.chat())
        await gate.entered(s.engine)
        response = await s.chat()
        gate.open()
        assert (await running).status_code == 200
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["reason"] == "queue_full"


@pytest.mark.parametrize("model", ["TINY", "gpt-4o", "tiny "])
async def test_an_unknown_model_is_told_what_is_served(model: str) -> None:
    async with served() as s:
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
            response = await s.post(path, body | {"model": model})
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["reason"], error["served"]) == ("model_not_found", ["tiny", "alias"])
            assert "use one of: 'tiny', 'alias'" in error["message"]


async def test_a_very_long_model_name_is_not_repeated_in_full() -> None:
    async with served() as s:
        assert len((await s.chat(model="m" * 1000)).text) < 500


@pytest.mark.parametrize("model", ["", None, "alias", "tiny"])
async def test_the_served_model_has_many_names_and_none(model: str | None) -> None:
    async with served() as s:
        assert (await s.chat(model=model)).json()["model"] == "tiny"


async def test_any_model_name_where_the_operator_wants_it() -> None:
    async with served(unknown_model=ModelNames.ANY) as s:
        assert (await s.chat(model="gpt-4o")).json()["model"] == "tiny"


# ── after the 200 ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_engine_that_dies_ends_streams_with_an_error_frame_and_answers_with_a_500() -> None:
    gate = Gate(generating(2))
    async with served(ScriptedBackend(on_decode=gate)) as s:
        streaming = asyncio.create_task(s.chat(stream=True))
        whole = asyncio.create_task(s.chat())
        await gate.entered(s.engine)
        s.engine.fail_all("it was killed")
        streamed, answered = await streaming, await whole
        gate.open()
    assert streamed.status_code == 200
    frames = frames_of(streamed.text)
    error = frames.data.pop()["error"]
    assert (error["code"], error["type"]) == (500, "server_error")
    assert "it was killed" in error["message"]
    assert not frames.done
    assert answered.status_code == 500
    assert answered.json()["error"]["reason"] == "engine_failure"
    assert {record.error_code for record in s.metrics.records} == {"engine_failure"}
    # What was known of the requests stays in the log, although the engine can tell nothing more.
    assert all(timings.predicted_n > 0 for record in s.metrics.records for timings in record.timings)


# ── while it loads ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            EngineStatus(EngineState.LOADING, phase="loading the model", progress=0.25, retry_after_s=4),
            "the model is loading",
        ),
        (
            EngineStatus(EngineState.RESTARTING, reason="it was killed", retry_after_s=4),
            "the engine is being restarted",
        ),
        (EngineStatus(EngineState.STOPPING, retry_after_s=4), "the server is stopping"),
        (
            EngineStatus(EngineState.FAILED, reason="out of memory", retry_after_s=4),
            "the engine has failed: out of memory",
        ),
    ],
)
async def test_everything_but_health_root_and_metrics_is_503(status: EngineStatus, words: str) -> None:
    async with served() as s:
        ready = s.engine.status
        s.engine.status = status
        answers = {
            ("POST", "/v1/chat/completions"): await s.chat(),
            ("POST", "/v1/completions"): await s.post("/v1/completions", {"prompt": "x"}),
            ("POST", "/completion"): await s.post("/completion", {"prompt": "x"}),
            ("POST", "/tokenize"): await s.post("/tokenize", {"content": "x"}),
            ("POST", "/detokenize"): await s.post("/detokenize", {"tokens": []}),
            ("POST", "/apply-template"): await s.post("/apply-template", {"messages": HELLO}),
            ("GET", "/v1/models"): await s.http.get("/v1/models"),
            ("GET", "/props"): await s.http.get("/props"),
            ("GET", "/slots"): await s.http.get("/slots"),
        }
        health = await s.http.get("/health")
        others = [(await s.http.get(path)).status_code for path in ("/", "/v1", "/metrics", "/openapi.json")]
        s.engine.status = ready
    for (method, path), response in answers.items():
        assert response.status_code == 503, (method, path)
        assert response.headers["retry-after"] == "4"
        error = response.json()["error"]
        assert (error["type"], error["retry_after"]) == ("unavailable_error", 4)
        assert error["message"].startswith(words)
        assert error.get("progress") == status.progress
    assert health.status_code == 503
    assert health.headers["retry-after"] == "4"
    assert health.json()["error"]["state"] == status.state.value
    assert others == [200] * 4


async def test_health_while_loading_speaks_llama_cpps_words() -> None:
    async with served() as s:
        ready = s.engine.status
        s.engine.status = EngineStatus(EngineState.LOADING, phase="warming up", progress=1.0)
        for path in ("/health", "/v1/health"):
            error = (await s.http.get(path)).json()["error"]
            assert (error["code"], error["message"], error["type"]) == (503, "Loading model", "unavailable_error")
            assert (error["progress"], error["phase"], error["restarts"]) == (1.0, "warming up", 0)
        s.engine.status = ready
        assert (await s.http.get("/health")).json() == {"status": "ok"}


# ── faults of ours ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_is_a_500_with_a_sentence_and_its_traceback_in_the_log(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("server.api.render.chat.ChatWriter.chunk", broken)
    monkeypatch.setattr("server.api.render.chat.ChatWriter.whole", broken)
    async with served() as s:
        response = await s.chat(stream=stream)
        await assert_idle(s.engine)
    error = frames_of(response.text).data[-1]["error"] if stream else response.json()["error"]
    assert response.status_code == (200 if stream else 500)
    assert (error["code"], error["type"]) == (500, "server_error")
    assert "secret" not in error["message"]
    assert "ZeroDivisionError: secret detail" in caplog.text
