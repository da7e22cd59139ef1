"""Schemas of tools' arguments in great variety, for calls that have to fit them."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("city", "größe", "数量", "a-b", "x.y", "user_id", "Ключ", "is ok", "type", "name", "$v", "0")
_CHOICES: tuple[Any, ...] = ("red", "grün", "蓝", "", "null", "17", '"q"', 17, 2.5, True, None, [1, "a"], {"k": "v"})
_PATTERNS = (
    "^[a-z]{2,4}$",
    "[0-9]+",
    "^(ab|cd)+$",
    r"^\d{3}-\w{2}$",
    "^a|b$",
    r"^[^\s/]{1,5}/[^\s/]{1,5}$",
    r"^(?:\+\d{1,3})? ?\d{4}$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration")

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}


class SchemaMaker:
    """Random schemas; strings and lists in them are short, so that a model without sense comes to an end."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def parameters(self) -> dict[str, Any]:
        """The schema of a tool's arguments."""
        draw = self._draw
        schema = self._object(2, names=draw.sample(_NAMES, draw.randint(0, 5)))
        if draw.random() < 0.15:
            schema["anyOf"] = [{"required": [name]} for name in schema["properties"]] or [{}]
        if draw.random() < 0.15:
            schema["oneOf"] = [
                {"properties": {"kind": {"const": kind}, f"of_{kind}": self.value(1)}, "required": ["kind"]}
                for kind in ("p", "q")
            ]
            schema.pop("additionalProperties", None)
        if draw.random() < 0.15 and len(schema["properties"]) > 1:
            first, second = list(schema["properties"])[:2]
            schema["dependentRequired"] = {first: [second]}
        if draw.random() < 0.1 and schema["properties"]:
            schema["minProperties"] = 1
        if draw.random() < 0.2:
            schema["properties"]["tree"] = {"$ref": "#/$defs/tree"}
            schema["$defs"] = {"tree": TREE}
        return schema

    def value(self, depth: int) -> Any:
        """The schema of a value, which nests `depth` deep at most."""
        makers = [self._string, self._number, self._choice, self._plain, self._union]
        if depth > 0:
            makers += [self._array, self._nested]
        return self._draw.choice(makers)(depth)

    def _string(self, depth: int) -> Any:
        draw = self._draw
        match draw.randrange(4):
            case 0:
                return {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 12}
            case 1:
                return {"type": "string", "format": draw.choice(_FORMATS)}
            case 2:
                return {"type": "string", "enum": draw.sample([c for c in _CHOICES if isinstance(c, str)], 3)}
            case _:
                least = draw.randint(0, 3)
                return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}

    def _number(self, depth: int) -> Any:
        draw = self._draw
        least = draw.randint(-50, 50)
        match draw.randrange(4):
            case 0:
                return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 120)}
            case 1:
                return {"type": "number", "exclusiveMinimum": least, "maximum": least + draw.randint(1, 9)}
            case 2:
                return {"type": "integer", "multipleOf": draw.choice((2, 5)), "minimum": 0, "maximum": 1000}
            case _:
                return {"type": draw.choice(("boolean", "null"))}

    def _choice(self, depth: int) -> Any:
        if self._draw.random() < 0.5:
            return {"enum": self._draw.sample(_CHOICES, 4)}
        return {"const": self._draw.choice(_CHOICES)}

    def _plain(self, depth: int) -> Any:
        kinds = [kind for kind in ("null", "boolean") if self._draw.random() < 0.5]
        return {"type": [*kinds, "string"], "maxLength": 8}

    def _union(self, depth: int) -> Any:
        draw = self._draw
        parts = [self.value(0) for _ in range(draw.randint(2, 3))]
        if draw.random() < 0.3:
            return {"allOf": [{"anyOf": parts}]}
        return {"anyOf": parts}

    def _array(self, depth: int) -> Any:
        least = self._draw.randint(0, 2)
        schema = {"type": "array", "minItems": least, "maxItems": least + 2, "items": self.value(depth - 1)}
        return schema if self._draw.random() < 0.8 else {"anyOf": [schema, {"type": "string", "maxLength": 6}]}

    def _nested(self, depth: int) -> Any:
        return self._object(depth - 1, names=self._draw.sample(_NAMES, self._draw.randint(1, 3)))

    def _object(self, depth: int, names: list[str]) -> dict[str, Any]:
        draw = self._draw
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
        }
        match draw.randrange(4):
            case 0 | 1:
                schema["additionalProperties"] = False
            case 2:
                schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 99}
                schema["propertyNames"] = {}
            case _:
                pass
        return schema
