"""What a tool's JSON schema allows for each argument: a set of JSON types and, for enum and const, the values.

Schemas come from clients and may be anything: unknown keywords, contradictions and cycles end in "anything goes".
Read are $ref (local), type (name or list), enum, const, nullable, anyOf, oneOf, allOf, properties and
additionalProperties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TYPE_NAMES = {
    "string": "string",
    "str": "string",
    "integer": "integer",
    "int": "integer",
    "number": "number",
    "float": "number",
    "boolean": "boolean",
    "bool": "boolean",
    "object": "object",
    "dict": "object",
    "array": "array",
    "list": "array",
    "null": "null",
}
ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


@dataclass(frozen=True, slots=True)
class Allowed:
    """`types` always has "integer" where it has "number". `choices` is None unless enum or const list the values."""

    types: frozenset[str]
    choices: tuple[Any, ...] | None = None

    @property
    def only_string(self) -> bool:
        return self.types == {"string"}


def type_name(name: object) -> str | None:
    """JSON Schema's name for a type, whatever language it was named in; None: unknown."""
    return _TYPE_NAMES.get(name.lower()) if isinstance(name, str) else None


def json_type(value: object) -> str:
    """JSON's name for the type of a decoded value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def intersect(parts: Iterable[Allowed | None]) -> Allowed | None:
    """What all parts allow; None (anything) allows everything. A part that contradicts the ones before is ignored."""
    result: Allowed | None = None
    for part in parts:
        if part is None:
            continue
        if result is None:
            result = part
        elif types := result.types & part.types:
            result = Allowed(types, part.choices if result.choices is None else result.choices)
    return result


def union(parts: Iterable[Allowed | None]) -> Allowed | None:
    """What any part allows; None where there are no parts or one allows anything."""
    types: frozenset[str] = frozenset()
    choices: tuple[Any, ...] | None = ()
    for part in parts:
        if part is None:
            return None
        types |= part.types
        choices = None if choices is None or part.choices is None else choices + part.choices
    return Allowed(types, choices or None) if types else None


class SchemaTypes:
    """Answers "which types does this sub-schema allow" within one root schema. Each sub-schema is read once."""

    __slots__ = ("_memo", "root")

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._memo: dict[int, Allowed | None] = {}

    def resolve(self, schema: object) -> Mapping[str, Any] | None:
        """Follow local references until a schema that is none; None for what is no schema or cannot be found."""
        for _ in range(32):
            if not isinstance(schema, Mapping):
                return None
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = self._look_up(reference)
        return None

    def allowed(self, schema: object) -> Allowed | None:
        """None: anything goes."""
        if not isinstance(schema, Mapping):
            return None
        key = id(schema)
        if key not in self._memo:
            self._memo[key] = None  # a cycle that comes back here learns nothing new
            try:
                self._memo[key] = self._read(schema)
            except RecursionError:
                self._memo[key] = None
        return self._memo[key]

    def _read(self, schema: Mapping[str, Any]) -> Allowed | None:
        parts: list[Allowed | None] = [_named(schema.get("type")), _listed(schema)]
        if "$ref" in schema:
            parts.append(self.allowed(self.resolve(schema)))
        parts.extend(union(map(self.allowed, _branches(schema, keyword))) for keyword in ("anyOf", "oneOf"))
        parts.extend(self.allowed(branch) for branch in _branches(schema, "allOf"))
        if all(part is None for part in parts):
            parts.append(_implied(schema))
        found = intersect(parts)
        if found is not None and schema.get("nullable") is True:
            choices = None if found.choices is None else (*found.choices, None)
            found = Allowed(found.types | {"null"}, choices)
        return found

    def _look_up(self, reference: str) -> object:
        if reference == "#":
            return self.root
        if not reference.startswith("#/"):
            return None
        place: object = self.root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping):
                place = place.get(name)
            elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            else:
                return None
        return place


def _named(kind: object) -> Allowed | None:
    names = kind if isinstance(kind, list) else [kind]
    types = {type_name(name) for name in names}
    known = frozenset(name for name in types if name is not None)
    if not known or None in types:
        return None
    return Allowed(_with_integer(known))


def _listed(schema: Mapping[str, Any]) -> Allowed | None:
    values: object = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return Allowed(_with_integer(frozenset(json_type(value) for value in values)), tuple(values))


def _with_integer(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _implied(schema: Mapping[str, Any]) -> Allowed | None:
    if "properties" in schema or "additionalProperties" in schema:
        return Allowed(frozenset({"object"}))
    if "items" in schema or "prefixItems" in schema:
        return Allowed(frozenset({"array"}))
    return None


def _branches(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    branches = schema.get(keyword)
    return branches if isinstance(branches, list) else []
