"""The grammar of one GLM tool call: an offered name, declared keys in any order (none twice, required ones there),
values of their schemas, and the closing tags. Written so that the parser (`glm_calls.py`, `arguments.py`) reads back
what was meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.chat.argument_variants import Variant, VariantReader
from server.chat.lark import ANYTHING, NOTHING_LEFT, Lark, either, literal, regex
from server.chat.messages import Tool
from server.chat.patterns import whole_match
from server.chat.raw_strings import RawStrings
from server.chat.schema_limits import Limits, enforceable
from server.chat.schema_types import ALL_TYPES, Allowed, SchemaTypes, intersect
from server.chat.tags import Tag
from server.chat.toolbox import strip_gap

# What a value must not spell out, because the parser would see its end there (`glm_values.py`): a closing tag with
# another tag behind it, a key, a doubled opener. Tags that are only spoken of are data.
_BLANK = r"(?:\s|\\[nrt])*"
FORBIDDEN_IN_CALLS = (
    rf"{Tag.VALUE_CLOSE.value}{_BLANK}<",
    rf"{Tag.CALL_CLOSE.value}{_BLANK}<",
    rf"{Tag.VALUE_CLOSE.value}[^<]*{Tag.KEY_CLOSE.value}",
    rf"{Tag.KEY_CLOSE.value}{_BLANK}{Tag.VALUE_OPEN.value}",
    rf"\A{Tag.VALUE_OPEN.value}",
)

_MOST_BITS = 60  # llguidance counts with 64
_OTHER_BIT = 61  # an undeclared argument is there
_GAP = regex(r"\n?")
_OTHER_KEY = r"[^\s<>\\\x00-\x1f](?:[^<>\\\n\x00-\x1f]{0,62}[^\s<>\\\x00-\x1f])?"
_KEPT_AT_ROOT = ("dependentRequired", "minProperties", "maxProperties")
_EDGE = r"[\s\x1c-\x1f]*"  # what str.strip takes away
# Texts that the parser reads as something else than a string, where a string is not all that is allowed.
_READ_AS = {
    "null": r"null",
    "boolean": r"true|false",
    "integer": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "object": r"\{(?s:.*)\}",
    "array": r"\[(?s:.*)\]",
    "string": r'"(?s:.*)"',
}


def write_calls(lark: Lark, tools: Sequence[Tool], limits: Mapping[str, Limits], *, simple: bool = False) -> str:
    """Add the rule of what stands behind a call's opening tag, closing tag included; its name. `limits` by tool's name.
    `simple`: schemas of values do not count, only the keys."""
    rules = []
    for i, tool in enumerate(tools):
        arguments = _Arguments(lark, tool, f"t{i}", limits[tool.name], simple=simple)
        rules.append(f"{literal(tool.name)} {_gap(lark)} ({' | '.join(arguments.rules())}) {Tag.CALL_CLOSE.value}")
    return lark.rule("call_body", "\n  | ".join(rules))


def _gap(lark: Lark) -> str:
    """One line break may stand between tags, as in the layout of 4.5."""
    return lark.terminal(_GAP)


class _Arguments:
    """The arguments of one tool. `prefix` makes its rules' names unique."""

    def __init__(self, lark: Lark, tool: Tool, prefix: str, limits: Limits, *, simple: bool) -> None:
        self._lark = lark
        self._prefix = prefix
        self._limits = limits
        self._simple = simple
        root = tool.parameters
        kept = {keyword: root[keyword] for keyword in _KEPT_AT_ROOT if keyword in root}
        rest = {keyword: value for keyword, value in root.items() if keyword not in kept}
        cleaned = enforceable(rest, limits)
        self._root: dict[str, Any] = (cleaned if isinstance(cleaned, dict) else {}) | kept
        self._types = SchemaTypes(self._root)
        self._strings = RawStrings(self._types, is_writable)

    def rules(self) -> list[str]:
        """One for each variant of the arguments."""
        reader = VariantReader(self._types)
        variants = reader.read(self._root) or [Variant()]
        for keyword, path in reader.relaxed:
            self._limits.cannot(keyword, path)
        kinds = {key: self._readings(key, variants) for variant in variants for key in variant.keys}
        return [self._variant(f"{self._prefix}v{i}", variant, kinds) for i, variant in enumerate(variants)]

    # ── which keys ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _variant(self, name: str, variant: Variant, kinds: Mapping[str, Allowed | None]) -> str:
        keys = []
        for key in variant.keys:
            if strip_gap(key) == key and key and is_writable(key):
                keys.append(key)
            else:
                self._limits.cannot(f"properties/{key}", "#")
        pairs = [self._pair(literal(key), self._value(variant.members.get(key, ()), kinds[key])) for key in keys]
        other = self._other_pair(variant, keys)
        if other is not None and (variant.least > 1 or variant.most is not None):
            self._limits.cannot("minProperties" if variant.least > 1 else "maxProperties", "#")
        if not keys:
            repeated = "" if other is None else f"{other}{'+' if variant.least else '*'}"
            return self._lark.rule(name, repeated or NOTHING_LEFT)
        if len(keys) > _MOST_BITS:
            return self._in_order(name, variant, keys, pairs, other)
        bit = {key: i for i, key in enumerate(keys)}
        conditions = [f"bit_set({bit[key]})" for key in keys if key in variant.required]
        conditions += [f"or(bit_clear({bit[key]}), bit_set({bit[need]}))" for key, need in variant.needs if key in bit]
        counts = f"[0:{len(keys)}]"
        last = list(conditions)
        if variant.least:
            enough = f"bit_count_ge({counts}, {variant.least})"
            last.append(enough if other is None else f"or({enough}, bit_set({_OTHER_BIT}))")
        choices = [f"{NOTHING_LEFT} {_if(last)}"]
        for key, pair in zip(keys, pairs, strict=True):
            wanted = [f"bit_clear({bit[key]})"]
            if other is None and variant.most is not None:
                wanted.append(f"bit_count_lt({counts}, {variant.most})")
            choices.append(f"{pair} {name}::set_bit({bit[key]}) {_if(wanted)}")
        if other is not None:  # behind the required ones, so that a model which only makes up keys comes to an end
            choices.append(f"{other} {name}::set_bit({_OTHER_BIT}) {_if(conditions)}")
        self._lark.rule(f"{name}::_", "\n  | ".join(choices))
        return f"{name}::0x0"

    def _in_order(self, name: str, variant: Variant, keys: list[str], pairs: list[str], other: str | None) -> str:
        """More keys than bits: in the order of the schema, then others."""
        parts = [pair if key in variant.required else f"{pair}?" for key, pair in zip(keys, pairs, strict=True)]
        if variant.least or variant.most is not None:
            self._limits.cannot("minProperties" if variant.least else "maxProperties", "#")
        if variant.needs:
            self._limits.cannot("dependentRequired", "#")
        return self._lark.rule(name, " ".join([*parts, *([f"{other}*"] if other else [])]))

    def _pair(self, key: str, value: str) -> str:
        gap = _gap(self._lark)
        return self._rule(
            f"{Tag.KEY_OPEN.value} {key} {Tag.KEY_CLOSE.value} {gap} "
            f"{Tag.VALUE_OPEN.value} {value} {Tag.VALUE_CLOSE.value} {gap}"
        )

    def _other_pair(self, variant: Variant, keys: Sequence[str]) -> str | None:
        """Keys that the schema does not name but allows expressly, or leaves open by naming none; None: it does not."""
        root = self._root
        patterns = root.get("patternProperties")
        others = root.get("additionalProperties")
        names_nothing = bool(root) and not keys and "properties" not in root
        if variant.only is not None or not (
            patterns or others not in (None, False) or (names_nothing and others is None)
        ):
            return None
        known = [literal(key) for key in dict.fromkeys([*keys, *variant.members, *variant.banned]) if key]
        unnamed = regex(_OTHER_KEY) + (f" & ~{either(known)}" if known else "")
        choices, matched = [], []
        for pattern, schema in patterns.items() if isinstance(patterns, Mapping) else ():
            expression = regex(whole_match(pattern))
            choices.append((f"{unnamed} & {expression}", schema))
            matched.append(expression)
        if others is not False:
            rest = "".join(f" & ~{expression}" for expression in matched)
            choices.append((unnamed + rest, {} if others is None else others))
        pairs = [
            self._pair(self._lark.terminal(key), self._value((schema,), None))
            for key, schema in choices
            if schema is not False
        ]
        return self._rule(either(pairs)) if pairs else None

    def _rule(self, body: str) -> str:
        return self._lark.named(body)

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _readings(self, key: str, variants: Iterable[Variant]) -> Allowed | None:
        """The types the parser may take the key's text for; it may see another variant in it than was meant."""
        types: frozenset[str] = frozenset()
        for variant in variants:
            if key in variant.members:
                allowed = intersect(map(self._types.allowed, variant.members[key]))
                if allowed is None:
                    return None
                types |= allowed.types
        return Allowed(types) if types else None

    def _value(self, schemas: tuple[Any, ...], kinds: Allowed | None) -> str:
        schema: Any = schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)} if schemas else {}
        if self._simple:
            return self._lark.terminal(ANYTHING)
        own = intersect(map(self._types.allowed, schemas))
        own_types = ALL_TYPES if own is None else own.types
        if "string" in own_types and (kinds is None or len(kinds.types) > 1) and _is_only_types(schema):
            return self._lark.terminal(ANYTHING)  # any text is a value of one of the types
        choices = []
        text = self._strings.expression(schema) if "string" in own_types else None
        if text is not None:
            choices.append(self._lark.terminal(text + _not_read_otherwise(kinds)))
        others = sorted(own_types - {"string"} - ({"integer"} if "number" in own_types else set()))
        if others:
            choices.append(self._json(schema, others if "string" in own_types else None))
        return either(choices) if choices else self._lark.json(False)

    def _json(self, schema: Any, types: list[str] | None) -> str:
        """JSON of the schema, of these types only."""
        if types is not None:
            schema = {"allOf": [schema, {"type": types}]} if schema else {"type": types}
        if '"$ref"' not in json.dumps(schema):
            return self._lark.json(schema)
        moved: Any = _moved(schema)
        return self._lark.json({**moved, "$defs": {"root": _moved(self._root)}})


def is_writable(text: str) -> bool:
    """The text can stand in a call as it is."""
    return not any(re.search(pattern, text) for pattern in FORBIDDEN_IN_CALLS)


def _if(conditions: Sequence[str]) -> str:
    if not conditions:
        return ""
    joined = conditions[-1]
    for condition in reversed(conditions[:-1]):
        joined = f"and({condition}, {joined})"
    return f"%if {joined}"


def _not_read_otherwise(kinds: Allowed | None) -> str:
    if kinds is None:
        types: frozenset[str] = ALL_TYPES - {"string"}  # a quoted text stays as it is
    elif kinds.only_string:
        return ""
    else:
        types = kinds.types
    return "".join(
        f" & ~{pattern}"
        for pattern in dict.fromkeys(regex(f"{_EDGE}(?:{_READ_AS[kind]}){_EDGE}") for kind in sorted(types))
    )


def _is_only_types(schema: object) -> bool:
    if schema is True:
        return True
    if not isinstance(schema, Mapping):
        return False
    return all(
        keyword == "type" or (keyword == "anyOf" and isinstance(value, list) and all(map(_is_only_types, value)))
        for keyword, value in schema.items()
    )


def _moved(schema: object) -> object:
    """References to the root lead to a definition named root."""
    if isinstance(schema, Mapping):
        return {
            key: "#/$defs/root" + value[1:]
            if key == "$ref"
            and isinstance(value, str)
            and value.startswith("#")
            and not value.startswith("#/$defs/root")
            else _moved(value)
            for key, value in schema.items()
        }
    return [_moved(each) for each in schema] if isinstance(schema, list) else schema
