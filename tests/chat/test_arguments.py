"""Raw text of arguments becomes JSON by the tool's schema. cases/glm.json has more of these, end to end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.arguments import ArgumentSchema, read_value
from server.chat.schema_types import SchemaTypes

kinds = ["string", "integer", "number", "boolean", "object", "array", "null"]
schemas = st.recursive(
    st.one_of(
        st.just({}),
        st.sampled_from([*kinds, "date", 3]).map(lambda kind: {"type": kind}),
        st.lists(st.sampled_from(kinds), max_size=3).map(lambda names: {"type": names, "nullable": True}),
        st.lists(st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["7", "a"]), max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.sampled_from(["#", "#/$defs/A", "x"]).map(lambda reference: {"$ref": reference}),
    ),
    lambda inner: st.builds(
        lambda keyword, branches: {keyword: branches},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, max_size=3),
    ),
    max_leaves=6,
)
raws = st.one_of(
    st.text(st.characters(codec=None)),
    st.sampled_from(
        ["null", "None", "True", "7", "7.0", '"7"', "[1", "{'a': 1}", '{"a": 1}', "[]", " 3\n", "-", "NaN"]
    ),
)


def value_of(raw: str, schema: dict[str, Any]) -> object:
    return json.loads(read_value(raw, SchemaTypes({}).allowed(schema)))


@given(raws, schemas)
def test_any_text_for_any_schema_is_valid_json(raw: str, schema: dict[str, Any]) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"A": schema}, "anyOf": [{"properties": {"b": schema}}, schema]}
    members = ArgumentSchema(parameters).write_members({"a": raw, "b": raw, "c": raw})
    members.encode()
    assert json.loads("{" + members + "}").keys() == {"a", "b", "c"}


@given(st.text())
def test_a_string_is_taken_to_the_letter(raw: str) -> None:
    assert value_of(raw, {"type": "string"}) == raw


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_what_the_template_writes_reads_back_where_its_type_is_allowed(value: object) -> None:
    """Templates write strings raw and all else as JSON."""
    raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    kind = {str: "string", list: "array", int: "integer", bool: "boolean", type(None): "null"}[type(value)]
    assert value_of(raw, {"type": kind}) == value


@pytest.mark.parametrize(
    ("raw", "schema", "expected"),
    [
        ("9" * 5000, {"type": "integer"}, None),
        ("3.0", {"type": "integer"}, 3),
        ("1e400", {"type": "integer"}, "1e400"),
        ('"3.0"', {"type": "integer"}, 3),
        ('"\\"3\\""', {"type": "integer"}, '"\\"3\\""'),
        ("TRUE", {"type": "boolean"}, "TRUE"),
        ("True", {"type": ["boolean", "string"]}, "True"),
        ("{'a': 1}", {"type": ["object", "string"]}, "{'a': 1}"),
        ("[1, 2,]", {"type": "array"}, [1, 2]),
        ("{'a': 1}", {"type": "array"}, "{'a': 1}"),
        ("", {"type": "integer"}, ""),
        ("true", {"enum": [1, "x"]}, "true"),
    ],
)
def test_edges(raw: str, schema: dict[str, Any], expected: object) -> None:
    text = read_value(raw, SchemaTypes({}).allowed(schema))
    if expected is None:
        assert text == raw  # digit for digit, beyond what the interpreter converts
    else:
        assert json.loads(text) == expected


def test_numbers_keep_their_spelling() -> None:
    assert read_value("0.10000000000000000555", SchemaTypes({}).allowed({"type": "number"})) == "0.10000000000000000555"


MOVE = {
    "properties": {"speed": {"type": "integer"}},
    "required": ["kind"],
    "oneOf": [
        {"properties": {"kind": {"const": "street"}, "to": {"type": "string"}}, "required": ["kind", "to"]},
        {"properties": {"kind": {"const": "floor"}, "to": {"type": "integer"}, "lift": {"type": "boolean"}}},
        {"properties": {"kind": {"enum": ["zone", "area"]}, "to": {"type": "array"}}},
    ],
}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ({"to": "5", "kind": "street"}, {"to": "5", "kind": "street"}),
        ({"to": "5", "kind": "floor", "speed": "2"}, {"to": 5, "kind": "floor", "speed": 2}),
        ({"kind": "area", "to": "[5]"}, {"kind": "area", "to": [5]}),
        ({"to": "5", "lift": "true"}, {"to": 5, "lift": True}),  # only one branch has that key
        ({"to": "Main Street"}, {"to": "Main Street"}),
    ],
)
def test_a_root_union_is_decided_by_the_whole_call(pairs: dict[str, str], expected: dict[str, Any]) -> None:
    assert json.loads("{" + ArgumentSchema(MOVE).write_members(pairs) + "}") == expected


def test_what_may_stream_is_a_string_whatever_else_comes() -> None:
    schema = ArgumentSchema(
        {"properties": {"s": {"type": "string"}, "n": {"type": ["string", "null"]}, "e": {"enum": ["a"]}}}
    )
    assert [key for key in ("s", "n", "e", "other") if schema.may_stream(key)] == ["s", "e"]
    assert not ArgumentSchema({**MOVE, "properties": {"s": {"type": "string"}}}).may_stream("s")


def test_declared_and_required_keys_come_from_every_part() -> None:
    schema = ArgumentSchema(
        {
            "$ref": "#/$defs/Root",
            "$defs": {"Root": {"allOf": [{"properties": {"a": {}}, "required": ["a", 7]}, {"properties": {"b": {}}}]}},
        }
    )
    assert schema.declared == {"a", "b"}
    assert schema.required == {"a"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [], "required": "a", "allOf": {}, "anyOf": [1, None], "$defs": 3},
        {"allOf": [{"$ref": "#"}] * 50, "anyOf": [{"$ref": "#"}] * 50},
        {"properties": {"a": None, "b": True}},
    ],
)
def test_schemas_that_make_no_sense_declare_little_and_end(parameters: dict[str, Any]) -> None:
    assert json.loads("{" + ArgumentSchema(parameters).write_members({"a": "x", "n": "1"}) + "}") == {"a": "x", "n": 1}
