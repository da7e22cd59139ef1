from __future__ import annotations

import logging

import pytest

from server.api.options import CorsOptions
from tests.support.http import HELLO, keys_of, served

KEYS = ("first-secret", "second-sécret")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer first-secret"}, 200),
        ({"authorization": "bearer first-secret"}, 200),
        ({"AUTHORIZATION": "BEARER  first-secret "}, 200),
        ({"X-API-Key": "first-secret"}, 200),
        ({"x-api-key": "second-sécret"}, 200),
        ({"x-api-key": "wrong", "Authorization": "Bearer first-secret"}, 200),
        ({"x-api-key": "first-secret", "Authorization": "Bearer wrong"}, 200),
        ({"Authorization": "first-secret"}, 401),
        ({"Authorization": "Basic first-secret"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "first-secre"}, 401),
        ({"x-api-key": "first-secret2"}, 401),
    ],
)
async def test_keys(headers: dict[str, str], status: int) -> None:
    async with served(api_keys=keys_of(*KEYS)) as s:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        response = await s.http.get("/v1/models", headers=raw)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["code"], error["type"], error["reason"]) == (401, "authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/"])
async def test_public_paths(path: str) -> None:
    async with served(api_keys=keys_of(*KEYS)) as s:
        assert (await s.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1", "/props", "/slots", "/metrics", "/openapi.json", "/nothing", "/health/../v1/models"]
)
async def test_all_else_is_closed(path: str) -> None:
    async with served(api_keys=keys_of(*KEYS)) as s:
        assert (await s.http.get(path)).status_code == 401


async def test_without_keys_everybody_may_ask() -> None:
    async with served() as s:
        assert (await s.http.get("/v1/models", headers={"Authorization": "Bearer whatever"})).status_code == 200


async def test_a_key_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served(api_keys=keys_of(*KEYS)) as s:
        await s.post("/v1/chat/completions", {"messages": HELLO}, Authorization="Bearer first-secret")
        await s.post("/v1/chat/completions", {"messages": HELLO}, Authorization="Bearer guessed-secret")
        await s.metrics.finished(2)
    assert "secret" not in caplog.text
    assert "hello" not in caplog.text


# ── browsers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-api-key,content-type",
}


async def test_a_preflight_needs_no_key() -> None:
    async with served(api_keys=keys_of(*KEYS)) as s:
        response = await s.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    allowed = response.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "x-api-key", "content-type"))
    assert "POST" in response.headers["access-control-allow-methods"]


async def test_errors_have_cors_headers_too() -> None:
    async with served(api_keys=keys_of(*KEYS)) as s:
        response = await s.http.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://chat.example"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("localhost",), "http://localhost:3000", "http://localhost:3000"),
        (("localhost",), "http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        (("localhost",), "http://app.localhost", "http://app.localhost"),
        (("localhost",), "http://localhost.evil.example", None),
        (("localhost", "https://a.example"), "https://a.example", "https://a.example"),
        ((), "https://a.example", None),
    ],
)
async def test_origins(origins: tuple[str, ...], origin: str, allowed: str | None) -> None:
    async with served(cors=CorsOptions(origins=origins)) as s:
        response = await s.http.get("/health", headers={"Origin": origin})
    assert response.headers.get("access-control-allow-origin") == allowed


async def test_any_origin_without_credentials_is_a_star() -> None:
    async with served(cors=CorsOptions(credentials=False)) as s:
        response = await s.http.get("/health", headers={"Origin": "https://a.example"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers
