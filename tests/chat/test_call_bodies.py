"""Calls in other notations than GLM's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.call_bodies import is_complete, read_body, read_pairs
from server.chat.messages import Tool
from server.chat.toolbox import Toolbox

TOOLS = Toolbox(
    [
        Tool("send", {"properties": {"parcel": {"type": "string"}, "copies": {"type": "integer"}}}, {}),
        Tool("tide_table", {}, {}),
    ]
)


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "send", "arguments": {"parcel": "7"}}', [("send", {"parcel": "7"})]),
        ('{"name": "send", "args": {"parcel": "7"}}', [("send", {"parcel": "7"})]),
        ('{"name": "send", "input": "{\\"parcel\\": \\"7\\"}"}', [("send", {"parcel": "7"})]),
        ('{"name": "send", "arguments": ""}', [("send", {})]),
        ('{"name": "send", "arguments": null}', [("send", {})]),
        ('{"name": "send", "parcel": "7"}', [("send", {"parcel": "7"})]),
        ('{"tool": "launch", "arguments": {"n": 1.5}}', [("launch", {"n": 1.5})]),
        ('{"function": {"name": "send", "arguments": {}}}', [("send", {})]),
        ('{"send": {"parcel": "7"}}', [("send", {"parcel": "7"})]),
        ('[{"name": "tide_table"}, {"name": "send", "arguments": {}}]', [("tide_table", {}), ("send", {})]),
        ("{'name': 'send', 'arguments': {'parcel': '7', 'copies': None}}", [("send", {"parcel": "7", "copies": None})]),
        ('{"name": "send", "arguments": {"parcel": "7"}}}', [("send", {"parcel": "7"})]),
        ('```json\n{"name": "send", "arguments": {}}\n```', [("send", {})]),
        ('send {"parcel": "a\nb"}', [("send", {"parcel": "a\nb"})]),
        ('send\n{"parcel": "7"}', [("send", {"parcel": "7"})]),
        ('send>{"parcel": "7"}', [("send", {"parcel": "7"})]),
        ('send({"parcel": "7"})', [("send", {"parcel": "7"})]),
        ('launch {"parcel": "7"}', [("launch", {"parcel": "7"})]),
        ("send parcel='it\\'s 7', copies=2", [("send", {"parcel": "it's 7", "copies": 2})]),
        ("send(parcel=two words, copies=2)", [("send", {"parcel": "two words", "copies": 2})]),
        ('send parcel={"a": [1]} copies=2', [("send", {"parcel": '{"a": [1]}', "copies": 2})]),
        ("sendparcel=7", [("send", {"parcel": "7"})]),
        ("tide_table", [("tide_table", {})]),
        ("tide_table()", [("tide_table", {})]),
        ("launch", [("launch", {})]),
        ('{"name": "send", "arguments": {"a": 1, "a": 2}}', [("send", {"a": 2})]),
    ],
)
def test_notations(body: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    found = read_body(body, TOOLS)
    assert found is not None
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize(
    "body",
    [
        "send a parcel",
        "a tag in prose",
        '{"parcel": "7"}',
        '{"name": "send", "arguments": "not json"}',
        '{"name": "send", "arguments": [1]}',
        '{"name": "send", "color": "red"}',
        '{"name": "two words", "arguments": {}}',
        '[{"name": "send"}, 3]',
        "[]",
        '{"name": "send", "arguments": {"parcel"',
        'send {"parcel"',
        "launch site=b",
        "send " + "k=v " * 20_000,
    ],
)
def test_what_is_no_call(body: str) -> None:
    assert read_body(body, TOOLS) is None


@given(st.text(alphabet="{}[]()<>\"'=,: \n\\sendparcl7", max_size=40))
def test_any_body_ends_in_valid_json_or_nothing(body: str) -> None:
    for call in read_body(body, TOOLS) or []:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name


def test_pairs() -> None:
    assert read_pairs('a="x y", b = 3') == {"a": "x y", "b": "3"}
    assert read_pairs("no pairs") is None
    assert read_pairs("") is None


def test_only_a_closed_body_counts_as_complete() -> None:
    assert is_complete('send {"a": 1}\n')
    assert not is_complete("send parcel=7")
