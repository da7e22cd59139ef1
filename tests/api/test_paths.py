"""Routing: mistakes in URLs that are mended, and errors that say the way out."""

from __future__ import annotations

import pytest

from tests.support.http import HELLO, keys_of, served


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/chat/completions/",
        "//v1//chat/completions",
        "/v1/v1/chat/completions",
        "/v1/v1/v1/chat/completions",
    ],
)
async def test_many_ways_to_the_chat(path: str) -> None:
    async with served() as s:
        response = await s.http.post(f"http://glmserve{path}", json={"messages": HELLO})
    assert response.json()["choices"][0]["message"]["content"] == "<hello>"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/v1/v1/models", "/v1/v1"])
async def test_many_ways_to_the_models(path: str) -> None:
    async with served() as s:
        assert (await s.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/chat/completion", "did you mean POST /v1/chat/completions?"),
        ("POST", "/V1/Chat/Completions", "did you mean POST /v1/chat/completions?"),
        ("POST", "/api/chat/completions", "did you mean POST /chat/completions?"),
        ("POST", "/api/v1/completions", "did you mean POST /v1/completions?"),
        ("GET", "/propz", "did you mean GET or POST /props?"),
        ("GET", "/etc/passwd", "the base URL for OpenAI clients ends in /v1"),
    ],
)
async def test_an_unknown_path_names_the_nearest(method: str, path: str, words: str) -> None:
    async with served() as s:
        response = await s.http.request(method, path)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["reason"]) == ("not_found_error", "not_found")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/props", "GET, POST"),
        ("PUT", "/v1/models/tiny", "GET"),
        ("TRACE", "/health", "GET"),
        ("BREW", "/", "GET"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(method: str, path: str, allow: str) -> None:
    async with served() as s:
        response = await s.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    assert response.json()["error"]["reason"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/rerank", "/infill", "/v1/responses", "/v1/messages", "/lora-adapters"],
)
async def test_what_others_have_and_we_have_not(path: str) -> None:
    async with served() as s:
        response = await s.post(path, {})
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"


async def test_head_is_get_without_the_body() -> None:
    async with served() as s:
        get, head = await s.http.get("/health"), await s.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


async def test_everything_moves_with_the_prefix() -> None:
    async with served(prefix="/llm", api_keys=keys_of("k")) as s:
        assert (await s.http.get("/llm/health")).status_code == 200
        assert (await s.http.get("/llm")).status_code == 200
        assert (await s.http.get("/llm/")).status_code == 200
        assert (await s.http.get("/health", headers={"x-api-key": "k"})).status_code == 404
        chat = await s.post("/llm/v1/v1/chat/completions", {"messages": HELLO}, x_api_key="k")
        assert chat.status_code == 200
        missing = await s.http.get("/llm/v1/model", headers={"x-api-key": "k"})
        assert "did you mean GET /llm/v1/models?" in missing.json()["error"]["message"]
        records = await s.metrics.finished(5)
    assert [record.route for record in records] == ["/health", "/", "/", "other", "/v1/chat/completions"]


async def test_front_page_and_base() -> None:
    async with served() as s:
        page = await s.http.get("/")
        base = (await s.http.get("/v1/")).json()
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    assert (base["name"], base["model"]) == ("glmserve", "tiny")
