"""Turns the raw text of arguments into JSON by the tool's schema: the wire format itself carries no types.

An argument that may only be a string is taken verbatim. Any other is a JSON value where its text is one of an allowed
type, and text where nothing fits, so the result is valid JSON always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.chat import json_text
from server.chat.json_text import kind_of, quote
from server.chat.python_literals import python_to_json
from server.chat.schema_types import Allowed, SchemaTypes, intersect, json_type, union

_MAX_PARTS = 500  # sub-schemas of a root schema that are looked into; references can multiply without end
_PYTHON_WORDS = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


def read_value(raw: str, allowed: Allowed | None) -> str:
    """The JSON text of one argument. `allowed` None: not declared, where JSON counts unless it is a string."""
    text = raw.strip()
    if allowed is None:
        return quote(raw) if kind_of(text) in (None, "string") else text
    if allowed.only_string:
        return quote(raw)
    found = _typed(text, allowed)
    if found is None or _is_meant_as_text(raw, found, allowed):
        return quote(raw)
    return found


def _typed(text: str, allowed: Allowed, *, quoted: bool = False) -> str | None:
    types = allowed.types
    kind = kind_of(text)
    if kind in types:
        return text
    if kind == "number" and "integer" in types:
        return _as_integer(text)
    if "string" in types:
        return None
    if kind == "string" and not quoted:
        return _typed(json_text.read(text).strip(), allowed, quoted=True)
    if text in _PYTHON_WORDS:
        python_kind, word = _PYTHON_WORDS[text]
        return word if python_kind in types else None
    if "object" in types and text.startswith("{"):
        return _lenient(text)
    if "array" in types and text.startswith(("[", "(")):
        return _lenient(text)
    return None


def _as_integer(text: str) -> str | None:
    value = float(text)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else None


def _lenient(text: str) -> str | None:
    """A container in Python's spelling, or JSON with raw line breaks in its strings."""
    found = python_to_json(text)
    if found is not None:
        return found
    try:
        return json_text.write(json_text.read(text, strict=False))
    except ValueError:
        return None


def _is_meant_as_text(raw: str, found: str, allowed: Allowed) -> bool:
    """An enum has the text itself, but not what it reads as."""
    return (
        allowed.choices is not None
        and "string" in allowed.types
        and raw in allowed.choices
        and not _is_choice(found, allowed.choices)
    )


def _is_choice(text: str, choices: Iterable[Any]) -> bool:
    try:
        value = json_text.read(text)
    except ValueError:
        return False
    numbers = ("integer", "number")
    return any(
        value == choice
        and (json_type(value) == json_type(choice) or {json_type(value), json_type(choice)} <= {*numbers})
        for choice in choices
    )


@dataclass(slots=True)
class _Shape:
    """What one object schema says of its members. A member may be described in several places: all hold."""

    members: dict[str, list[object]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    unions: list[list[_Shape]] = field(default_factory=list)


class ArgumentSchema:
    """The schema of one tool's arguments. Any mapping will do: what cannot be understood declares nothing."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._types = SchemaTypes(parameters)
        self._shape = _Shape()
        self._others: Allowed | None = None
        self._n_left = _MAX_PARTS
        self._collect(parameters, self._shape, depth=0)
        self.declared = frozenset(_names(self._shape))
        self.required = frozenset(self._shape.required)
        self._plain: dict[str, Allowed | None] = {}

    @property
    def longest_key(self) -> int:
        return max(map(len, self.declared), default=0)

    def may_stream(self, key: str) -> bool:
        """The text of this argument is taken verbatim whatever the others are."""
        if self._shape.unions:
            return False
        allowed = self._of(key)
        return allowed is not None and allowed.only_string

    def write_members(self, pairs: Mapping[str, str]) -> str:
        """`"key": value, ...` without braces, for raw texts by key. Types that depend on other keys see these only."""
        shapes = self._fitting(pairs) if self._shape.unions else ()
        return ", ".join(
            f"{quote(key)}: {read_value(raw, self._allowed(key, shapes) if shapes else self._of(key))}"
            for key, raw in pairs.items()
        )

    def _of(self, key: str) -> Allowed | None:
        if key not in self._plain:
            self._plain[key] = self._allowed(key, ())
        return self._plain[key]

    def _allowed(self, key: str, unions: Iterable[list[_Shape]]) -> Allowed | None:
        parts = [self._types.allowed(schema) for schema in self._shape.members.get(key, ())]
        parts += [
            union(intersect(map(self._types.allowed, shape.members[key])) for shape in shapes if key in shape.members)
            for shapes in unions
        ]
        return intersect(parts) if key in self.declared else self._others

    def _fitting(self, pairs: Mapping[str, str]) -> list[list[_Shape]]:
        """Of each union the branches that these arguments fit best, by constants, then required keys, then all keys,
        then values. A test that no branch passes is left out."""
        result = []
        for shapes in self._shape.unions:
            fitting = shapes
            for test in (self._constants_fit, _required_fit, _keys_fit, self._values_fit):
                fitting = [shape for shape in fitting if test(shape, pairs)] or fitting
            result.append(fitting)
        return result

    def _constants_fit(self, shape: _Shape, pairs: Mapping[str, str]) -> bool:
        for key, schemas in shape.members.items():
            allowed = intersect(map(self._types.allowed, schemas)) if key in pairs else None
            if allowed is not None and allowed.choices is not None:
                raw = pairs[key]
                if raw not in allowed.choices and not _is_choice(raw.strip(), allowed.choices):
                    return False
        return True

    def _values_fit(self, shape: _Shape, pairs: Mapping[str, str]) -> bool:
        for key, raw in pairs.items():
            allowed = intersect(map(self._types.allowed, shape.members.get(key, ())))
            if allowed is not None and "string" not in allowed.types and _typed(raw.strip(), allowed) is None:
                return False
        return True

    def _collect(self, schema: object, shape: _Shape, *, depth: int) -> None:
        resolved = self._types.resolve(schema)
        self._n_left -= 1
        if resolved is None or depth > 8 or self._n_left < 0:
            return
        properties = resolved.get("properties")
        if isinstance(properties, Mapping):
            for key, member in properties.items():
                shape.members.setdefault(key, []).append(member)
        required = resolved.get("required")
        if isinstance(required, list):
            shape.required.update(key for key in required if isinstance(key, str))
        if depth == 0 and "additionalProperties" in resolved:
            self._others = self._types.allowed(resolved["additionalProperties"])
        for branch in _list(resolved, "allOf"):
            self._collect(branch, shape, depth=depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if branches := _list(resolved, keyword):
                shapes = [_Shape() for _ in branches]
                for branch, branch_shape in zip(branches, shapes, strict=True):
                    self._collect(branch, branch_shape, depth=depth + 1)
                if any(_names(branch_shape) for branch_shape in shapes):
                    shape.unions.append(shapes)


def _required_fit(shape: _Shape, pairs: Mapping[str, str]) -> bool:
    return shape.required <= pairs.keys()


def _keys_fit(shape: _Shape, pairs: Mapping[str, str]) -> bool:
    return pairs.keys() <= _names(shape)


def _names(shape: _Shape) -> set[str]:
    names = set(shape.members)
    for shapes in shape.unions:
        for branch in shapes:
            names |= _names(branch)
    return names


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
