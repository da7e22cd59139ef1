"""Which texts are strings of a schema, as an expression of Lark: for places where they are written without quotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.chat.lark import ANYTHING, either, literal, regex
from server.chat.patterns import FORMAT_PATTERNS, whole_match
from server.chat.schema_types import SchemaTypes, type_name

_MAX_DEPTH = 16
_MOST_CHARS = 1_000_000  # longer bounds are none


class RawStrings:
    """Reads sub-schemas of one root. `is_writable` says whether a text can be written at all."""

    def __init__(self, types: SchemaTypes, is_writable: Callable[[str], bool]) -> None:
        self._types = types
        self._is_writable = is_writable

    def expression(self, schema: object, depth: int = 0) -> str | None:
        """All strings that `schema` allows; None: there is none."""
        if schema is False:
            return None
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ANYTHING
        parts: list[str] = []
        for part in self._parts(schema, depth):
            if part is None:
                return None
            if part != ANYTHING:
                parts.append(part)
        return " & ".join(dict.fromkeys(parts)) if parts else ANYTHING

    def _parts(self, schema: Mapping[str, Any], depth: int) -> Iterable[str | None]:
        """Expressions that all hold."""
        kinds = schema.get("type")
        if kinds is not None:
            names = [type_name(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
            yield ANYTHING if "string" in names or None in names else None
        if "$ref" in schema:
            yield self.expression(self._types.resolve(schema), depth + 1)
        if "const" in schema:
            yield self._listed([schema["const"]])
        if isinstance(schema.get("enum"), list):
            yield self._listed(schema["enum"])
        for branch in _list(schema, "allOf"):
            yield self.expression(branch, depth + 1)
        if branches := _list(schema, "anyOf"):
            yield self._any_of(branches, depth)
        if branches := _list(schema, "oneOf"):
            yield self._one_of(branches, depth)
        yield from _own_parts(schema)

    def _listed(self, values: list[Any]) -> str | None:
        texts = [value for value in values if isinstance(value, str) and self._is_writable(value)]
        return either(map(literal, texts)) if texts else None

    def _any_of(self, branches: list[Any], depth: int) -> str | None:
        found = [self.expression(branch, depth + 1) for branch in branches]
        possible = [_grouped(each) for each in found if each is not None]
        if ANYTHING in possible:
            return ANYTHING
        return either(possible) if possible else None

    def _one_of(self, branches: list[Any], depth: int) -> str | None:
        found = [self.expression(branch, depth + 1) for branch in branches]
        possible = [_grouped(each) for each in found if each is not None]
        if len(possible) <= 1:
            return possible[0] if possible else None
        alone = []
        for i, each in enumerate(possible):
            others = either([*possible[:i], *possible[i + 1 :]])
            alone.append(f"({each} & ~{_grouped(others)})")
        return either(alone)


def _own_parts(schema: Mapping[str, Any]) -> Iterable[str]:
    if isinstance(schema.get("pattern"), str):
        yield regex(whole_match(schema["pattern"]))
    least, most = _count(schema, "minLength"), _count(schema, "maxLength")
    if least or most is not None:
        yield regex(f"(?s:.{{{least or 0},{'' if most is None else most}}})")
    if schema.get("format") in FORMAT_PATTERNS:
        yield regex(FORMAT_PATTERNS[schema["format"]])


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_CHARS
    return int(value) if usable else None  # type: ignore[arg-type]


def _grouped(expression: str) -> str:
    return f"({expression})" if " & " in expression else expression


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
