"""Makes a client's JSON schema one that can be enforced token by token, and says what had to be left out.

Keywords of other dialects (draft 4's boolean exclusiveMinimum, OpenAPI's nullable, type names of other languages) are
translated; annotations are dropped. What remains is what llguidance knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.chat.patterns import FORMAT_PATTERNS
from server.chat.schema_types import ALL_TYPES, type_name
from server.errors import InvalidRequest

# Checked after the fact only, so no grammar can hold a text to them.
UNENFORCED = frozenset(
    {"not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}
    | {"$dynamicRef", "$recursiveRef"}
)
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # llguidance's
_EXACT_FORMATS = frozenset({"date-time", "time", "date", "email"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "id", "strict", "x-guidance"}
)
_HARMLESS: dict[str, tuple[Any, ...]] = {  # values that ask for nothing
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SHOWN = 60  # characters of a wrong type's name that a message repeats
_SINGLE = frozenset({"items", "additionalProperties", "additionalItems"})


@dataclass(slots=True)
class Limits:
    """Of one schema, in one field of a request. `strict`: refuse what cannot be enforced."""

    field: str
    strict: bool
    relaxed: list[str] = dataclasses.field(default_factory=list)  # "keyword at path"

    def cannot(self, keyword: str, path: str) -> None:
        """Raises InvalidRequest where the schema is strict."""
        self._refuse_if_strict(
            f"the keyword '{keyword}' at {path} cannot be enforced while the answer is written; take it out of the "
            f"schema, or ask without 'strict'"
        )
        self.note(keyword, path)

    def unknown_type(self, name: object, path: str) -> None:
        """Raises InvalidRequest where the schema is strict."""
        shown = repr(name) if len(repr(name)) <= _SHOWN else f"{repr(name)[:_SHOWN]}…"
        self._refuse_if_strict(f"type {shown} at {path} is no JSON type; use {', '.join(sorted(ALL_TYPES))}")
        self.note(f"type {shown}", path)

    def _refuse_if_strict(self, why: str) -> None:
        if self.strict:
            raise InvalidRequest(f"Field '{self.field}': {why}", param=self.field.partition(".")[0])

    def note(self, keyword: str, path: str) -> None:
        self.relaxed.append(f"{keyword} at {path}")


def enforceable(schema: Mapping[str, Any] | bool, limits: Limits) -> dict[str, Any] | bool:
    """The schema as it will be enforced. Raises InvalidRequest for a keyword that a strict one must not have."""
    return schema if isinstance(schema, bool) else _mapping(schema, "#", limits)


def _schema(schema: object, path: str, limits: Limits) -> Any:
    return _mapping(schema, path, limits) if isinstance(schema, Mapping) else schema


def _mapping(schema: Mapping[str, Any], path: str, limits: Limits) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        here = f"{path}/{keyword.replace('~', '~0').replace('/', '~1')}"
        if keyword in _ANNOTATIONS or keyword == "nullable":
            continue
        if keyword in UNENFORCED:
            if not _is_harmless(keyword, value, schema):
                limits.cannot(keyword, path)
        elif keyword in _MAPS and isinstance(value, Mapping):
            result[keyword] = {
                name: _schema(member, f"{here}/{name.replace('~', '~0').replace('/', '~1')}", limits)
                for name, member in value.items()
            }
        elif keyword in _LISTS and isinstance(value, list):
            result[keyword] = [_schema(member, f"{here}/{i}", limits) for i, member in enumerate(value)]
        elif keyword == "items" and isinstance(value, list):  # before draft 2020-12
            result["prefixItems"] = [_schema(member, f"{here}/{i}", limits) for i, member in enumerate(value)]
            if "additionalItems" in schema:
                result["items"] = _schema(schema["additionalItems"], f"{path}/additionalItems", limits)
        elif keyword == "additionalItems":
            continue
        elif keyword in _SINGLE:
            result[keyword] = _schema(value, here, limits)
        else:
            _other(keyword, value, path, result, limits)
    _translate(schema, path, result, limits)
    return result


def _other(keyword: str, value: object, path: str, result: dict[str, Any], limits: Limits) -> None:
    match keyword:
        case "type":
            names = value if isinstance(value, list) else [value]
            known = [type_name(name) for name in names]
            if None in known:
                limits.unknown_type(names[known.index(None)], path)
            else:
                result["type"] = known if isinstance(value, list) else known[0]
        case "format":
            if value in _EXACT_FORMATS:  # llguidance's own are wider: seconds up to 60, names without end
                result.setdefault("allOf", []).append({"pattern": f"^(?:{FORMAT_PATTERNS[value]})$"})
            elif value in FORMATS:
                result["format"] = value
            else:  # an annotation by the standard, unless somebody agreed otherwise
                limits.note(f"format {value!r}", path)
        case "$ref":
            if isinstance(value, str) and value.startswith("#"):
                result["$ref"] = value
            else:
                limits.cannot("$ref", path)
        case "required" if not isinstance(value, list):
            pass  # draft 3's, inside a property
        case _:
            result[keyword] = value


def _translate(schema: Mapping[str, Any], path: str, result: dict[str, Any], limits: Limits) -> None:
    if schema.get("nullable") is True and "type" in result:
        kinds = result["type"] if isinstance(result["type"], list) else [result["type"]]
        result["type"] = list(dict.fromkeys([*kinds, "null"]))
        if isinstance(result.get("enum"), list) and None not in result["enum"]:
            result["enum"] = [*result["enum"], None]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(result.get(exclusive), bool) and result.pop(exclusive) and bound in result:  # draft 4
            result[exclusive] = result.pop(bound)
    if not limits.strict:
        _drop_loose_counts(path, result, limits)


def _drop_loose_counts(path: str, result: dict[str, Any], limits: Limits) -> None:
    """llguidance counts members only where all the declared ones are required."""
    properties = result.get("properties")
    required = result.get("required")
    optional = set(properties if isinstance(properties, Mapping) else ()) - set(
        required if isinstance(required, list) else ()
    )
    for keyword in ("minProperties", "maxProperties"):
        if keyword in result and optional:
            del result[keyword]
            limits.note(keyword, path)


def _is_harmless(keyword: str, value: object, schema: Mapping[str, Any]) -> bool:
    match keyword:
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "unevaluatedProperties" if value is False:
            return schema.get("additionalProperties") is False
        case _:
            return value in _HARMLESS.get(keyword, ())
