"""One record and one log line for every request, with where its time went and no text of the client."""

from __future__ import annotations

import logging

import pytest

from tests.support.http import keys_of, served


async def test_a_finished_request_is_recorded_with_its_times() -> None:
    async with served(api_keys=keys_of("a", "b")) as s:
        headers = {"x_api_key": "b", "x_request_id": "req-1.a"}
        response = await s.post(
            "/v1/chat/completions?token=hidden", {"messages": [{"role": "user", "content": "q"}]}, **headers
        )
        (record,) = await s.metrics.finished(1)
    assert response.headers["x-request-id"] == "req-1.a"
    assert (record.route, record.method, record.status, record.request_id) == (
        "/v1/chat/completions",
        "POST",
        200,
        "req-1.a",
    )
    assert record.key_label == "key 2"
    assert (record.finish_reason, record.error_code, record.stream, record.disconnected) == ("stop", "", False, False)
    (timings,) = record.timings
    assert (timings.prompt_n, timings.predicted_n) == (1, 4)
    assert record.ttft_ms is not None
    assert 0 <= record.ttft_ms <= record.duration_ms


@pytest.mark.parametrize("given", ["", "a b", "ä", "x" * 65, 'a"b'])
async def test_a_request_id_that_could_forge_log_lines_is_replaced(given: str) -> None:
    async with served() as s:
        response = await s.http.get("/health", headers=[(b"x-request-id", given.encode())])
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 16


async def test_streams_choices_and_errors_are_recorded() -> None:
    async with served() as s:
        await s.chat(stream=True, n=2, max_tokens=2)
        await s.chat(n=2, stop="l")
        await s.chat(messages=[])
        await s.chat(model="other")
        await s.http.get("/nothing/at/all")
        await s.http.put("/v1/chat/completions")
        records = await s.metrics.finished(6)
    assert [(r.route, r.status, r.stream, r.finish_reason, r.error_code, len(r.timings)) for r in records] == [
        ("/v1/chat/completions", 200, True, "length", "", 2),
        ("/v1/chat/completions", 200, False, "stop", "", 2),
        ("/v1/chat/completions", 400, False, "", "invalid_request", 0),
        ("/v1/chat/completions", 404, False, "", "model_not_found", 0),
        ("other", 404, False, "", "not_found", 0),
        ("other", 405, False, "", "method_not_allowed", 0),
    ]


async def test_the_access_log_never_has_text_or_query(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served() as s:
        await s.post("/v1/completions?q=private", {"prompt": "private", "stop": ["private"], "user": "private"})
        await s.post("/v1/completions", {"prompt": "x", "temperature": "hot"})
        await s.metrics.finished(2)
    ours = [record for record in caplog.records if record.name.startswith("server.")]
    lines = [record.getMessage() for record in caplog.records if record.name == "server.ops.access"]
    assert [line.split(" ")[:3] for line in lines] == [
        ["POST", "/v1/completions", "200"],
        ["POST", "/v1/completions", "400"],
    ]
    assert "queue" in lines[0]
    assert "prefill" in lines[0]
    assert "decode" in lines[0]
    assert not any("private" in f"{record.getMessage()}{vars(record)}" for record in ours)
