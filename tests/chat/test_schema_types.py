"""Which JSON types a schema allows."""

from __future__ import annotations

from typing import Any

import pytest

from server.chat.schema_types import ALL_TYPES, Allowed, SchemaTypes, intersect, union


def types(schema: object, **root: Any) -> set[str] | None:
    found = SchemaTypes(root).allowed(schema)
    return None if found is None else set(found.types)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "INT"}, {"integer"}),
        ({"type": "bool"}, {"boolean"}),
        ({"type": "date"}, None),
        ({"type": ["string", "any"]}, None),
        ({"type": 7}, None),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"enum": []}, None),
        ({"const": {"a": 1}}, {"object"}),
        ({"const": 2.5}, {"number", "integer"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"nullable": True}, None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, {"integer"}),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, {"integer"}),
        ({"type": "string", "enum": [1]}, {"string"}),
        ({"type": ["string", "integer"], "anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"description": "free"}, None),
        (True, None),
        ("nonsense", None),
    ],
)
def test_allowed_types(schema: object, expected: set[str] | None) -> None:
    assert types(schema) == expected


def test_references_are_followed_within_the_root() -> None:
    definitions = {"A": {"$ref": "#/$defs/b~1c"}, "b/c": {"type": "boolean"}, "list": [{"type": "null"}]}
    assert types({"$ref": "#/$defs/A"}, **{"$defs": definitions}) == {"boolean"}
    assert types({"$ref": "#/$defs/list/0"}, **{"$defs": definitions}) == {"null"}
    assert types({"$ref": "#"}, type="object") == {"object"}


@pytest.mark.parametrize("reference", ["#/$defs/None", "#/$defs/list/9", "#/type/x", "other.json#/a", "a", 3])
def test_references_to_nowhere_allow_anything(reference: object) -> None:
    assert types({"$ref": reference}, type="object", **{"$defs": {"list": []}}) is None


def test_cycles_end() -> None:
    loop = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
    assert types({"$ref": "#/$defs/A"}, **loop) is None
    tree = {"$defs": {"T": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/T"}]}}}
    assert types({"$ref": "#/$defs/T"}, **tree) is None


def test_deep_schemas_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(50_000):
        schema = {"allOf": [schema]}
    assert types(schema) in ({"string"}, None)
    while "allOf" in schema:  # taken apart by hand: the interpreter would recurse
        schema = schema["allOf"].pop()


def test_choices_come_from_enum_const_and_unions_of_them() -> None:
    schema = {"anyOf": [{"const": "a"}, {"enum": ["b", 1]}]}
    assert SchemaTypes({}).allowed(schema) == Allowed(frozenset({"string", "integer"}), ("a", "b", 1))
    found = SchemaTypes({}).allowed({"anyOf": [{"const": "a"}, {"type": "integer"}]})
    assert found is not None
    assert found.choices is None


def test_union_and_intersection_of_nothing_allow_anything() -> None:
    everything = Allowed(ALL_TYPES)
    assert union([]) is None
    assert intersect([]) is None
    assert union([everything, None]) is None
    assert intersect([None, everything]) == everything
