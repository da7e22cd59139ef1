"""Several devices on a machine that has none: ggml's RPC servers on loopback."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.support.rpc_servers import rpc_servers
from tests.support.server_process import ServerProcess, run_to_end

pytestmark = pytest.mark.e2e


def test_devices_of_rpc_servers_are_listed() -> None:
    with rpc_servers(2) as endpoints:
        code, output = run_to_end(["--list-devices", "--rpc", ",".join(endpoints)])
    assert code == 0, output
    names = [line.partition(":")[0] for line in output.splitlines()]
    assert {"CPU", "RPC0", "RPC1"} <= set(names)


# ── layer split, really run ──────────────────────────────────────────────────────────────────────────────────────────

QUESTION = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0}
COMMON = ("--ctx-size", "2048", "-ctk", "q8_0", "-ctv", "q8_0", "--threads", "1", "--no-warmup", "--batch-size", "64")


def answer_and_props(
    model: tuple[str, ...], *arguments: str, n_tokens: int
) -> tuple[dict[str, Any], dict[str, Any], str]:
    with ServerProcess(*model, *COMMON, *arguments) as server:
        body = {**QUESTION, "max_tokens": n_tokens}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
        props = httpx.get(f"{server.url}/props", timeout=5).json()
        metrics = httpx.get(f"{server.url}/metrics", timeout=5).text
        assert server.stop() == 0, server.output
    return answer["choices"][0]["message"], props, metrics


@pytest.mark.parametrize(
    ("model", "n_tokens", "n_places", "splits"),
    [
        (("--demo", "glm"), 20, 7, {2: "4,3", 4: "1,3,2,1", 8: "1,1,1,1,1,1,1,0"}),
        (("--demo", "small"), 6, 31, {2: "10,21", 4: "5,9,9,8", 8: "4,4,4,4,4,4,4,3"}),
    ],
    ids=["tiny-glm", "demo"],
)
def test_a_split_model_answers_as_one_device_and_takes_what_was_planned(
    model: tuple[str, ...], n_tokens: int, n_places: int, splits: dict[int, str]
) -> None:
    alone, props, _ = answer_and_props(model, n_tokens=n_tokens)
    check_memory(props, ["host"])
    with rpc_servers(8) as endpoints:
        for count, split in splits.items():
            rpc = ("--rpc", ",".join(endpoints[:count]))
            names = [f"RPC{index}" for index in range(count)]
            for by_hand in ((), ("--tensor-split", split)):
                text, props, metrics = answer_and_props(model, *rpc, *by_hand, n_tokens=n_tokens)
                assert text == alone
                assert props["devices"] == [*names, "CPU"]
                assert props["pipelined"]
                assert sum(props["tensor_split"]) == n_places
                if by_hand:
                    assert props["tensor_split"] == [float(part) for part in split.split(",")]
                check_memory(props, [*names, "host"])
                assert 'glmserve_memory_planned_bytes{device="RPC0"}' in metrics
                assert 'glmserve_memory_actual_bytes{device="RPC0"}' in metrics


def check_memory(props: dict[str, Any], names: list[str]) -> None:
    """Planned and actual bytes within 2 % of each other."""
    assert [each["device"] for each in props["memory"]] == names
    for each in props["memory"]:
        assert abs(each["actual_bytes"] - each["planned_bytes"]) <= 0.02 * each["planned_bytes"] + 1024, each


def test_row_becomes_layer_with_a_warning_and_pipelining_can_be_switched_off() -> None:
    with rpc_servers(2) as endpoints:
        rpc = ("--demo", "glm", *COMMON, "--rpc", ",".join(endpoints))
        with ServerProcess(*rpc, "--split-mode", "row", "--pipeline", "off") as server:
            props = httpx.get(f"{server.url}/props", timeout=5).json()
            assert "row is served as layer" in server.output
            assert (props["split_mode"], props["pipelined"]) == ("layer", False)
            check_memory(props, ["RPC0", "RPC1", "host"])


def test_what_cannot_be_is_refused_before_the_load() -> None:
    code, output = run_to_end(["--demo", "glm", "--split-mode", "tensor", "--port", "0"])
    assert code == 2
    assert "--split-mode tensor is not possible with 'glm-dsa' models" in output
    began = time.monotonic()
    code, output = run_to_end(["--demo", "glm", "--ctx-size", "1000000000", "--port", "0"])
    assert code == 4
    assert "the model does not fit" in output
    assert "It would fit with" in output
    assert "--ctx-size" in output.partition("It would fit with")[2]
    assert time.monotonic() - began < 20  # 1 s alone; a machine that is busy takes longer
