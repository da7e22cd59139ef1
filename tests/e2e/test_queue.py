"""The queue of a real server: fifty answers on four slots, of two keys."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

KEYS = "greedy-key name=greedy\nmodest-key name=modest\nhalf-key name=half max-jobs=2\n"


async def ask(http: httpx.AsyncClient, key: str, n: int) -> None:
    """`n` answers of equal length at once."""
    body = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}
    headers = {"x-api-key": f"{key}-key"}
    asked = (http.post("/v1/completions", json=body | {"prompt": f"{i} of {key}"}, headers=headers) for i in range(n))
    for response in await asyncio.gather(*asked):
        assert response.status_code == 200, response.text


def median_wait(log: list[dict[str, Any]], key: str, n: int) -> float:
    """In lengths of an answer, so that it does not matter how fast the machine is just now."""
    answers = [record for record in log if record.get("key") == key]
    assert len(answers) == n
    length_ms = statistics.mean(answer["prompt_ms"] + answer["predicted_ms"] for answer in answers)
    return float(statistics.median(answer["queue_ms"] for answer in answers) / length_ms)


async def test_a_key_with_ten_requests_does_not_wait_for_one_with_forty(tiny_model: Path, tmp_path: Path) -> None:
    """Its median wait stays under twice what it is with two of the four slots for itself. The access log tells."""
    keys, log_file = tmp_path / "keys", tmp_path / "log"
    keys.write_text(KEYS)
    arguments = ("--parallel", "4", "--ctx-size", "4096", "--api-key-file", str(keys))
    log_arguments = ("--log-format", "json", "--log-file", str(log_file))
    with ServerProcess("--gguf", str(tiny_model), *arguments, *log_arguments) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            await ask(http, "half", 10)
            greedy = asyncio.create_task(ask(http, "greedy", 40))
            await asyncio.sleep(0)
            await asyncio.gather(greedy, ask(http, "modest", 10))
        assert server.stop() == 0
    text = log_file.read_text()
    assert "-key" not in text.replace("x-api-key", "")
    log = [json.loads(line) for line in text.splitlines()]
    share, modest, greedy_wait = (median_wait(log, key, n) for key, n in (("half", 10), ("modest", 10), ("greedy", 40)))
    print(f"median waits, in answers: share {share:.2f}, modest {modest:.2f}, greedy {greedy_wait:.2f}")
    assert share > 1.0
    assert modest < 2 * share
    assert modest < greedy_wait
