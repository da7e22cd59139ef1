"""The command plan: what it shows of models that are nothing but headers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.cli.devices_value import Bandwidths, MemorySize, PlannedDevice, PlannedDevices
from server.cli.values import BadValue
from tests.support.fake_hub import FakeHub, File
from tests.support.shapes import write_shape

GIB = 1 << 30
OPERATORS_BOX = "--devices 8x80GiB --ctx-size 131072 --parallel 2 -ctk q8_0 -ctv q8_0".split()


@pytest.fixture(scope="module")
def glm_5_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("glm-5.2"), "glm-5.2", n_shards=11)


@pytest.fixture(scope="module")
def with_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first header has 12 MiB, as the real one's."""
    return write_shape(tmp_path_factory.mktemp("whole"), "glm-5.2", n_shards=11, vocabulary=True)


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(["plan", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    (plan,) = json.loads("\n".join(lines_of(capsys, *arguments, "--json", code=code)))["plans"]
    assert isinstance(plan, dict)
    return plan


def test_the_operators_box(glm_5_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, str(glm_5_2), *OPERATORS_BOX, "--ubatch-size", "8192")
    assert "753.9 billion parameters" in lines[0]
    assert lines[2] == "2 slots, 65,536 tokens for one request; q8_0 cache, 50,592 bytes a token; ubatch 8192"
    bars = [line for line in lines if line.startswith("GPU")]
    assert len(bars) == 8
    assert bars[2].split()[:7] == ["GPU2", "10", "56.5", "0.8", "15.1", "0.5", "72.9"]
    assert bars[2].endswith("[######################..]  91%")
    assert "--pipeline on   72.9 GiB on the fullest GPU: fits  <- used" in lines
    assert "--pipeline off  65.8 GiB on the fullest GPU: fits" in lines
    assert "It fits: 7.1 GiB stay free on GPU2, the fullest." in lines
    flags = lines[lines.index("Flags") + 1].strip()
    assert flags.startswith("--split-mode layer --tensor-split 10,10,10,10,10,10,10,10 --n-gpu-layers all")
    assert any("a token reads 33.2 GB in GPUs: A100 at most 61 a second" in line for line in lines)


def test_the_flags_that_are_told_make_the_same_plan(glm_5_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json_of(capsys, str(glm_5_2), "--devices", "8x80GiB", "--ubatch-size", "2048")
    again = json_of(capsys, str(glm_5_2), "--devices", "8x80GiB", *told["flags"].split())
    for key in ("n_ctx", "n_slots", "n_ubatch", "tensor_split", "pipelined", "devices", "flags"):
        assert again[key] == told[key], key


def test_four_times_a_million_tokens(glm_5_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(glm_5_2), "--devices", "8x80GiB", "--parallel", "4", "--ctx-size", str(4 << 20)]
    lines = lines_of(capsys, *arguments, code=1)
    (verdict,) = [line for line in lines if line.startswith("It does not fit")]
    assert "GPU1 needs 109.3 GiB (weights 56.5 GiB + cache 48.0 GiB + compute buffer" in verdict
    ways = lines[lines.index("It would fit with") + 1 :][:3]
    assert ways[0].startswith("  --ctx-size 1751040  (437,760 tokens for one request)")
    plan = json_of(capsys, *arguments[:-1], ways[0].split()[1])
    assert plan["fits"]


def test_every_sum_is_shown_and_adds_up(glm_5_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, str(glm_5_2), *OPERATORS_BOX, "--explain")
    plan = json_of(capsys, str(glm_5_2), *OPERATORS_BOX)
    for device in plan["devices"]:
        assert device["total_bytes"] == sum(row["bytes"] for row in device["rows"])
        for row in device["rows"]:
            assert any(f"{row['bytes']:,}" in line and row["why"] in line for line in lines)


def test_named_gpus_and_measured_memory_give_a_speed(glm_5_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed = json_of(capsys, str(glm_5_2), *OPERATORS_BOX, "--devices", "8xA100-80GB")["speed"][0]
    assert speed["formula"] == "1 / (33.2 GB / 2,039 GB/s)"
    assert speed["at_most"] == pytest.approx(61.5, abs=0.1)
    measured = json_of(capsys, str(glm_5_2), *OPERATORS_BOX, "--bandwidth", "1500")["speed"][0]
    assert measured["at_most"] == pytest.approx(61.48 * 1500 / 2039, rel=0.001)


def test_what_is_read_from_the_host_slows_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_shape(tmp_path, "glm-4.7-flash", "q8_0")
    box = [str(model), "--devices", "1x16GiB", "--ram", "64GiB", "--ctx-size", "8192"]
    plan = json_of(capsys, *box)
    assert plan["n_cpu_moe"] > 0
    assert plan["speed"] == []
    slow, fast = (json_of(capsys, *box, "--bandwidth", f"1000,{host}")["speed"][0]["at_most"] for host in (50, 500))
    assert slow < fast


def test_a_plan_of_a_model_with_92_layers_takes_less_than_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processor time, the imports not counted; alone it is what a person waits."""
    model = write_shape(tmp_path, "glm-4.6")
    lines_of(capsys, str(model), "--devices", "8x80GiB", code=0)
    began = time.process_time()
    lines_of(capsys, str(model), "--devices", "8x80GiB", code=0)
    assert time.process_time() - began < 1.0


def test_this_box(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json_of(capsys, "--demo", "--ctx-size", "2048", "--device", "none")
    assert plan["fits"]
    assert plan["devices"][-1]["device"] == "host"
    assert plan["devices"][-1]["free_bytes"] > GIB


def test_what_the_server_would_refuse_is_refused_here(glm_5_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["-sm", "tensor"], "--split-mode tensor is not possible with 'glm-dsa' models"),
        (["-ctk", "q8_0"], "give --cache-type-v q8_0"),
        (["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "off"], "--cache-type-v q8_0 needs flash attention"),
    ):
        assert main(["plan", str(glm_5_2), "--devices", "8x80GiB", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert main(["plan", "--demo", "--devices", "2x80GiB", "--split-mode", "tensor"]) == 2
    assert "is not planned" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "no model is given" in capsys.readouterr().err


# ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hub(with_vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    small = write_shape(tmp_path, "glm-5.2", "q4_0")
    files = {f"UD-Q4_K_M/GLM-5.2-UD-Q4_K_M{path.name[-20:]}": path for path in sorted(with_vocabulary.parent.iterdir())}
    files["Q4_0/GLM-5.2-Q4_0.gguf"] = small
    hub = FakeHub()
    sparse = {}
    for number, (name, path) in enumerate(files.items()):
        sparse[name] = File(path, path.stat().st_size, f"{number:064x}", True)
    hub.add("team/GLM-5.2-GGUF", sparse)
    return hub


def test_a_remote_plan_reads_headers_only(
    hub: FakeHub, glm_5_2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        there = json_of(capsys, "team/GLM-5.2-GGUF:UD-Q4_K_M", *OPERATORS_BOX)
    here = json_of(capsys, str(glm_5_2), *OPERATORS_BOX)
    assert there["devices"] == here["devices"]
    assert there["exact"]
    assert hub.bytes_sent < 64 << 20


def test_quants_side_by_side(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        lines = lines_of(capsys, "team/GLM-5.2-GGUF", "--devices", "6x80GiB", "--ram", "1TiB", "--ctx-size", "32768")
    assert lines[0].split()[:3] == ["quant", "size", "fits"]
    assert lines[1].startswith("Q4_0 ")
    assert lines[2].startswith("UD-Q4_K_M ")
    assert "about" in lines[1] or "about" in lines[2]
    assert "yes" in lines[1]


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("8x80GiB", [80] * 8),
        ("80GB", [80]),
        ("2x80GiB, 1x24", [80, 80, 24]),
        ("8xA100", [80] * 8),
        ("2xA100-40GB", [40, 40]),
        ("RTX 4090,RTX 3090", [24, 24]),
        ("H200", [141]),
        ("none", []),
    ],
)
def test_devices(text: str, devices: list[int]) -> None:
    assert [device.n_bytes >> 30 for device in PlannedDevices().parse(text)] == devices


@pytest.mark.parametrize("text", ["", "8x", "17x80GiB", "0x80GiB", "8xtoaster", "x80GiB", "80GiB,,80GiB"])
def test_no_devices(text: str) -> None:
    with pytest.raises(BadValue):
        PlannedDevices().parse(text)


def test_sizes_and_bandwidths() -> None:
    assert MemorySize().parse("1TiB") == 1 << 40
    assert MemorySize().parse("512") == 512 << 30
    assert PlannedDevices().plain((PlannedDevice(80 << 30),)) == "81920MiB"
    assert Bandwidths().parse("1800,120") == (1.8e12, 1.2e11)
    assert Bandwidths().parse("1800") == (1.8e12, None)
    for kind, text in ((MemorySize(), "much"), (Bandwidths(), "fast"), (Bandwidths(), "1,2,3"), (Bandwidths(), "-1")):
        with pytest.raises(BadValue):
            kind.parse(text)
