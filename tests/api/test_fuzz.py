"""Every route from its own OpenAPI description: no 5xx, no undocumented status, answers of the described type."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.http import listening, served
from tests.support.scripted import ScriptedBackend
from tests.support.tiny_gguf import write_tiny_gguf

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@contextmanager
def live_server(folder: Path) -> Iterator[str]:
    """A server in a thread of its own, for clients that block."""
    model = write_tiny_gguf(folder / "model.gguf")
    ready: threading.Event = threading.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        found["stop"] = asyncio.Event()
        found["loop"] = asyncio.get_running_loop()
        backend = ScriptedBackend(reply=lambda prompt: prompt[:20], n_ctx=256)
        slots = served(backend, props=True, slot_actions=True, slot_folder=str(folder), model_path=str(model))
        async with slots as s, listening(s.app) as (base, _):
            found["base"] = base
            ready.set()
            await found["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="live server")
    thread.start()
    assert ready.wait(20)
    try:
        yield found["base"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(20)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_server(tmp_path_factory.mktemp("slots")) as url:
        yield url


@pytest.fixture(scope="module")
def api(base: str) -> Any:
    return schemathesis.openapi.from_url(f"{base}/openapi.json")


CAN_BE_WRONG = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("POST", "/v1/completions"),
    ("POST", "/completion"),
    ("POST", "/apply-template"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/slots"),
    ("POST", "/slots/{id_slot}"),
]
NEVER_WRONG = [
    ("POST", "/props"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/v1/health"),
    ("GET", "/v1"),
    ("GET", "/props"),
    ("GET", "/metrics"),
]


def test_the_schema_describes_every_route(api: Any) -> None:
    described = {(method.upper(), path) for path, item in api.raw_schema["paths"].items() for method in item}
    assert described == {*CAN_BE_WRONG, *NEVER_WRONG}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize(("method", "path"), CAN_BE_WRONG)
def test_no_input_breaks_the_server(method: str, path: str, mode: GenerationMode, api: Any, base: str) -> None:
    fuzz(api[path][method], mode, base, max_examples=30)


@pytest.mark.parametrize(("method", "path"), NEVER_WRONG)
def test_answers_are_as_described(method: str, path: str, api: Any, base: str) -> None:
    fuzz(api[path][method], GenerationMode.POSITIVE, base, max_examples=10)


def fuzz(operation: Any, mode: GenerationMode, base: str, max_examples: int) -> None:
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    def answers_as_described(case: Any) -> None:
        response = case.call(base_url=base, timeout=30)
        case.validate_response(response, checks=CHECKS)

    answers_as_described()
