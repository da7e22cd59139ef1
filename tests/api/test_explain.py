"""Who asks is told where a prompt differs from what is cached; the other prompt's text is for the operator alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http import keys_of, served

REST = " You are an agent. Be brief, and never lie to anybody, whoever asks and however often they do."


def body(clock: str, *, stream: bool = False) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": f"It is {clock}.{REST}"}], "stream": stream}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_header_shows_the_client_its_own_text(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server")
    async with served() as s:
        path = "/v1/chat/completions"
        first = await s.post(path, body("12:30:55", stream=stream), x_cache_explain="1")
        second = await s.post(path, body("12:31:07", stream=stream), x_cache_explain="1")
        silent = [await s.post(path, body("12:32:00", stream=stream), x_cache_explain=no) for no in ("0", "")]
    told = [json.loads(response.headers["x-cache-explain"]) for response in (first, second)]
    n_prompt = len(f"It is 12:31:07.{REST}")
    assert told[0] == {"prompt_tokens": n_prompt, "cached_tokens": 0, "diverged_at": None}
    assert told[1] == {
        "prompt_tokens": n_prompt,
        "cached_tokens": 10,
        "diverged_at": 10,
        "before": "It is 12:3",
        "here": "1:07. You are an",
        "alike_again_after": 4,
    }
    assert "0:55" not in second.headers["x-cache-explain"]
    assert all("x-cache-explain" not in response.headers for response in silent)
    assert "12:3" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
async def test_the_log_shows_both_where_the_operator_wants_it(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server")
    async with served(log_cache_misses=True, api_keys=keys_of("k")) as s:
        for clock in ("12:30:55", "12:31:07", "12:31:07"):
            await s.post("/v1/chat/completions", body(clock, stream=stream), x_api_key="k", x_request_id=f"at-{clock}")
        await s.metrics.finished(3)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("cache: ")]
    n_prompt = len(f"It is 12:31:07.{REST}")
    assert line == (
        f"cache: the prompt of request at-12:31:07 (key 1) is like the nearest cached one for 10 of {n_prompt} tokens, "
        "then comes '1:07. You are an' after 'It is 12:3', where the cached one has '0:55. You are an'; 4 tokens later "
        "both are alike again, so something stands there that changes with each request"
    )


async def test_a_difference_that_costs_little_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server")
    async with served(log_cache_misses=True) as s:
        for last in ("one", "two"):
            await s.chat(messages=[{"role": "user", "content": f"a long question that ends in {last}"}])
    assert "cache: " not in caplog.text


async def test_letters_outside_of_ascii_fit_into_the_header() -> None:
    async with served() as s:
        await s.post("/v1/completions", {"prompt": "größer 漢字"})
        response = await s.post("/v1/completions", {"prompt": "größer 漢語\r\nX-Evil: 1"}, x_cache_explain="1")
    told = json.loads(response.headers["x-cache-explain"])
    assert "X-Evil" in told["here"]
    assert "x-evil" not in response.headers


async def test_a_request_that_never_started_says_so() -> None:
    async with served() as s:
        refused = await s.post("/v1/completions", {"prompt": "x" * 5000}, x_cache_explain="1")
    assert refused.status_code == 400
    assert "x-cache-explain" not in refused.headers
