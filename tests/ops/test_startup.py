from __future__ import annotations

import io
import json
import shlex

import msgspec
import pytest

from server.engine.client import EngineState, EngineStatus
from server.engine.messages import DeviceInfo, DeviceMemory
from server.ops.startup import LoadProgress, curl_line, memory_lines, ready_lines, say
from tests.support.scripted import ScriptedBackend

FACTS = ScriptedBackend(n_ctx=262_144, n_slots=2).facts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("n_params", "size_bytes", "words"),
    [
        (753_864_132_864, 465_000_000_000, "754 billion parameters, F32, 433.1 GiB"),
        (134_515_008, 96_468_992, "135 million parameters, F32, 92.0 MiB"),
        (1_000, 4_096, "1,000 parameters, F32, 4 KiB"),
    ],
)
def test_the_ready_lines_say_what_the_engine_reported(n_params: int, size_bytes: int, words: str) -> None:
    gpus = [DeviceInfo(f"CUDA{i}", "a GPU", "gpu", 1, 2) for i in range(2)]
    facts = msgspec.structs.replace(FACTS, n_params=n_params, size_bytes=size_bytes, devices=gpus)
    lines = "\n".join(ready_lines(facts, ("glm-5.2", "glm"), "http://h:1", 61.04, needs_key=True))
    assert "ready in 61.0 s: scripted, " + words in lines
    assert "on CUDA0, CUDA1" in lines
    assert "2 slots, 262,144 tokens per request" in lines
    assert "model name: glm-5.2 (also glm)   base URL: http://h:1/v1   an API key is needed" in lines


def test_the_curl_line_can_be_pasted_whatever_the_model_is_called() -> None:
    words = shlex.split(curl_line('it\'s a "model"', "https://h:1", key=True, ca_unknown=True))
    assert words[:3] == ["curl", "-k", "https://h:1/v1/chat/completions"]
    assert "Authorization: Bearer YOUR-KEY" in words
    assert json.loads(words[-1])["model"] == 'it\'s a "model"'


def test_on_a_terminal_one_line_is_rewritten_and_cleared() -> None:
    out = Terminal()
    progress = LoadProgress(out)
    progress.show(EngineStatus(EngineState.LOADING, phase="loading the model", progress=0.5))
    assert "loading the model" in out.getvalue()
    assert " 50%" in out.getvalue()
    assert "\n" not in out.getvalue()
    progress.show(EngineStatus(EngineState.READY))
    assert out.getvalue().endswith("\r\x1b[K")


def test_elsewhere_a_phase_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = LoadProgress(io.StringIO())
    for share in (0.1, 0.2, 0.3):
        progress.show(EngineStatus(EngineState.LOADING, phase="loading the model", progress=share))
    progress.show(EngineStatus(EngineState.LOADING, phase="warming up", progress=1.0))
    assert [record.getMessage() for record in caplog.records] == ["loading the model 10%", "warming up"]


def test_say_writes_lines() -> None:
    out = io.StringIO()
    say(["one", "two"], out)
    assert out.getvalue() == "one\ntwo\n"


def test_memory_that_differs_from_the_plan_is_told() -> None:
    memory = [
        DeviceMemory("CUDA0", 60 << 30, 61 << 30),
        DeviceMemory("CUDA1", 60 << 30, 62 << 30),
        DeviceMemory("host", 1 << 30, None),
        DeviceMemory("tiny", 1 << 10, 2 << 10),
    ]
    lines = memory_lines(msgspec.structs.replace(FACTS, memory=memory))
    assert lines == ["memory: CUDA1 holds 62.0 GiB, 60.0 GiB were planned"]
