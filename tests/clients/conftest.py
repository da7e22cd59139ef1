"""One server with tiny-glm for all clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.tiny_glm.corpus import read_dialogues
from tests.support.random_glm import TINY_GLM
from tests.support.server_process import ServerProcess

MODEL = "tiny-glm"


@pytest.fixture(scope="package")
def base_url() -> Iterator[str]:
    shard = next(TINY_GLM.glob("*-00001-of-*.gguf"))
    with ServerProcess("--gguf", str(shard), "--parallel", "2", "--ctx-size", "8192", "--threads", "1") as server:
        yield f"{server.url}/v1"
        assert server.stop() == 0, server.output


@pytest.fixture(scope="package")
def dialogues() -> dict[str, dict[str, Any]]:
    return {dialogue["id"]: dialogue for dialogue in read_dialogues()}


def arguments_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in a dialogue's message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
