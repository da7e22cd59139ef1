"""The case runner, and our own cases through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.chat.messages import ContentDelta, ToolCallArguments, ToolCallStart
from tests.chat.run_cases import cuttings, first_fault, main, protocol_fault, read_cases, same_json

FILE = Path(__file__).parent / "cases" / "glm.json"
CASES = read_cases(FILE)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    assert first_fault(case) is None, case["rule"]


def test_every_case_has_its_own_name() -> None:
    assert len({case["id"] for case in CASES}) == len(CASES) >= 60


def test_the_command_counts_and_names_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = CASES[0]
    cases = [good]
    for field, value in (
        ("reasoning", "other"),
        ("content", "other"),
        ("tool_calls", [{"name": "a", "arguments": {}}]),
    ):
        cases.append({**good, "id": f"bad-{field}", "expect": {**good["expect"], field: value}})
    cases.append({**good, "id": "bad-reason", "expect": {**good["expect"], "finish_reason": "length"}})
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    assert main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "1 passed, 4 failed"
    assert all(f"FAILED {case['id']}: whole: " in printed for case in cases[1:])
    assert good["id"] not in printed


def test_the_command_succeeds_on_our_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(FILE)]) == 0
    assert capsys.readouterr().out == f"{len(CASES)} passed, 0 failed\n"


def test_the_command_wants_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_every_cutting_is_the_text_again() -> None:
    text = "é🎉 </think>"
    found = dict(cuttings(text))
    assert all("".join(pieces) == text for pieces in found.values())
    assert len(found["byte by byte"]) == len(text.encode()) + 1
    assert sum(name.startswith("cut at") for name in found) == len(text) - 1


@pytest.mark.parametrize(
    "deltas",
    [
        [ToolCallStart(1, "a", "f")],
        [ToolCallStart(0, "a", "")],
        [ToolCallStart(0, "a", "f"), ToolCallStart(1, "a", "f")],
        [ToolCallArguments(0, "{}")],
        [ToolCallStart(0, "a", "f"), ToolCallStart(1, "b", "f"), ToolCallArguments(0, "{}")],
    ],
)
def test_deltas_that_break_the_protocol_are_found(deltas: list[ToolCallStart | ToolCallArguments]) -> None:
    assert protocol_fault([ContentDelta("x"), *deltas]) is not None


def test_comparison_of_json_values() -> None:
    assert same_json([{"a": 3}], [{"a": 3.0}])
    assert not same_json([1], [True])
    assert not same_json({"a": 1}, {"b": 1})
    assert not same_json([1], [1, 2])
