from __future__ import annotations

from typing import Any

import pytest

from server.chat.schema_limits import Limits, enforceable
from server.errors import InvalidRequest

INTEGER = {"type": "integer"}
COUNTED = {"minProperties": 1, "required": ["a"], "properties": {"a": {}}}


def relaxed(schema: Any) -> tuple[Any, list[str]]:
    limits = Limits("json_schema", strict=False)
    return enforceable(schema, limits), limits.relaxed


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, True),
        ({}, {}),
        ({"type": "object", "title": "T", "$schema": "s", "description": "d"}, {"type": "object"}),
        ({"properties": {"title": {"type": "str"}}}, {"properties": {"title": {"type": "string"}}}),
        ({"type": ["dict", "None"]}, {}),
        ({"type": ["dict", "null"]}, {"type": ["object", "null"]}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"minimum": 3, "exclusiveMinimum": True}, {"exclusiveMinimum": 3}),
        ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
        ({"exclusiveMaximum": 3}, {"exclusiveMaximum": 3}),
        ({"items": [{"type": "int"}], "additionalItems": False}, {"prefixItems": [INTEGER], "items": False}),
        ({"required": True}, {}),
        ({"uniqueItems": False, "unevaluatedProperties": True}, {}),
        ({"additionalProperties": False, "unevaluatedProperties": False}, {"additionalProperties": False}),
        ({"$defs": {"a": {"title": "A", "const": 1}}}, {"$defs": {"a": {"const": 1}}}),
        (COUNTED, COUNTED),
    ],
)
def test_other_dialects_are_translated(schema: Any, expected: Any) -> None:
    assert relaxed(schema)[0] == expected


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {}}, "not at #"),
        ({"if": {}, "else": {}}, "if at #"),
        ({"properties": {"a/b": {"uniqueItems": True}}}, "uniqueItems at #/properties/a~1b"),
        ({"anyOf": [{}, {"contains": {}}]}, "contains at #/anyOf/1"),
        ({"items": {"propertyNames": {"pattern": "a"}}}, "propertyNames at #/items"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties at #"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired at #"),
        ({"$ref": "http://x/y"}, "$ref at #"),
        ({"$defs": {"x": {"not": {}}}}, "not at #/$defs/x"),
        ({"items": [{"not": {}}]}, "not at #/items/0"),
    ],
)
def test_what_cannot_be_enforced_is_refused_or_said(schema: Any, said: str) -> None:
    assert said in relaxed(schema)[1]
    keyword, _, path = said.partition(" at ")
    with pytest.raises(InvalidRequest) as caught:
        enforceable(schema, Limits("response_format.json_schema", strict=True))
    assert f"'{keyword}' at {path} cannot be enforced" in caught.value.message
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "tuple"}, "type 'tuple' at # is no JSON type"),
        ({"properties": {"a": {"type": ["string", "banana"]}}}, "type 'banana' at #/properties/a is no JSON type"),
        ({"type": 7}, "type 7 at # is no JSON type"),
    ],
)
def test_a_type_that_there_is_not_is_refused_with_those_that_there_are(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match="use array, boolean, integer, null, number, object, string") as caught:
        enforceable(schema, Limits("response_format.json_schema", strict=True))
    assert said in caught.value.message
    assert relaxed(schema)[1][0].startswith("type ")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"format": "regex"}, "format 'regex' at #"),
        ({"properties": {"a": {"format": 3}}}, "format 3 at #/properties/a"),
    ],
)
def test_formats_are_annotations(schema: Any, said: str) -> None:
    limits = Limits("json_schema", strict=True)
    enforceable(schema, limits)
    assert limits.relaxed == [said]


def test_counts_of_optional_members_are_left_out_where_that_is_allowed() -> None:
    schema = {"properties": {"a": {}}, "minProperties": 1}
    assert relaxed(schema) == ({"properties": {"a": {}}}, ["minProperties at #"])
    assert enforceable(schema, Limits("x", strict=True)) == schema
