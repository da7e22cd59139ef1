"""What the root of a tool's schema says of its arguments, spelt out: one variant for each way through its unions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.chat.schema_types import SchemaTypes

MOST_VARIANTS = 32
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """`members`: by key, schemas that all hold. `only`: no other keys than these; None: no such rule. `least` and
    `most` count members. `needs`: where the first key is there, the second must be."""

    members: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    banned: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    least: int = 0
    most: int | None = None
    needs: tuple[tuple[str, str], ...] = ()

    @property
    def keys(self) -> list[str]:
        """Those that may be written, in the order of the schema."""
        every = dict.fromkeys([*self.members, *sorted(self.required)])
        keys = [key for key in every if key not in self.banned and (self.only is None or key in self.only)]
        while lost := {key for key, need in self.needs if key in keys and need not in keys}:
            keys = [key for key in keys if key not in lost]
        return keys

    @property
    def is_possible(self) -> bool:
        return self.required <= set(self.keys) and (self.most is None or self.least <= self.most)

    def joined(self, other: Variant) -> Variant:
        """Both hold."""
        members = dict(self.members)
        for key, schemas in other.members.items():
            members[key] = members.get(key, ()) + schemas
        closed = [each.only for each in (self, other) if each.only is not None]
        limits = [each.most for each in (self, other) if each.most is not None]
        return Variant(
            members,
            self.required | other.required,
            self.banned | other.banned,
            frozenset.intersection(*closed) if closed else None,
            max(self.least, other.least),
            min(limits) if limits else None,
            self.needs + other.needs,
        )


class VariantReader:
    """`relaxed` collects what could not be told apart: keyword and path."""

    def __init__(self, types: SchemaTypes) -> None:
        self.relaxed: list[tuple[str, str]] = []
        self._types = types

    def read(self, schema: object, path: str = "#", depth: int = 0) -> list[Variant]:
        """At least one variant is possible, unless the schema allows no object at all."""
        if schema is False:
            return []
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return [Variant()]
        result = [_own(schema)]
        if "$ref" in schema:
            result = _product(result, self.read(self._types.resolve(schema), path, depth + 1))
        for i, branch in enumerate(_list(schema, "allOf")):
            result = _product(result, self.read(branch, f"{path}/allOf/{i}", depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if _list(schema, keyword):
                found = self._union(schema, keyword, path, depth)
                joined = _product(result, found)
                if len(joined) > MOST_VARIANTS:
                    self.relaxed.append((keyword, path))
                else:
                    result = joined
        return result

    def _union(self, schema: Mapping[str, Any], keyword: str, path: str, depth: int) -> list[Variant]:
        branches = [
            self.read(branch, f"{path}/{keyword}/{i}", depth + 1) for i, branch in enumerate(_list(schema, keyword))
        ]
        if keyword == "oneOf":
            branches = self._apart(branches, path)
        return [variant for branch in branches for variant in branch]

    def _apart(self, branches: list[list[Variant]], path: str) -> list[list[Variant]]:
        """Of `oneOf` exactly one branch may hold: where constants do not tell two apart, a key that the other one
        requires is banned."""
        result = []
        is_apart = True
        for i, branch in enumerate(branches):
            others = [variant for j, other in enumerate(branches) if j != i for variant in other]
            kept = []
            for variant in branch:
                bans = set(variant.banned)
                for other in others:
                    if self._excludes(variant, other):
                        continue
                    foreign = other.required - variant.required
                    if foreign:
                        bans.add(min(foreign))
                    else:
                        is_apart = False
                kept.append(variant.joined(Variant(banned=frozenset(bans))))
            result.append(kept)
        if not is_apart:
            self.relaxed.append(("oneOf", path))
        return result

    def _excludes(self, variant: Variant, other: Variant) -> bool:
        """A key that both require has no value that both allow."""
        for key in variant.required & other.required:
            mine, theirs = self._choices(variant, key), self._choices(other, key)
            if mine is not None and theirs is not None and not any(choice in theirs for choice in mine):
                return True
        return False

    def _choices(self, variant: Variant, key: str) -> tuple[Any, ...] | None:
        for schema in variant.members.get(key, ()):
            allowed = self._types.allowed(schema)
            if allowed is not None and allowed.choices is not None:
                return allowed.choices
        return None


def _product(left: Iterable[Variant], right: Iterable[Variant]) -> list[Variant]:
    pairs = itertools.product(left, right)
    return [joined for a, b in itertools.islice(pairs, 4 * MOST_VARIANTS) if (joined := a.joined(b)).is_possible]


def _own(schema: Mapping[str, Any]) -> Variant:
    properties = schema.get("properties")
    members = {key: (member,) for key, member in properties.items()} if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    dependent = schema.get("dependentRequired")
    return Variant(
        members,
        frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset(),
        frozenset(key for key, member in members.items() if member == (False,)),
        frozenset(members) if closed else None,
        _count(schema.get("minProperties")) or 0,
        _count(schema.get("maxProperties")),
        tuple(
            (key, need)
            for key, needs in (dependent.items() if isinstance(dependent, Mapping) else ())
            if isinstance(needs, list)
            for need in needs
            if isinstance(need, str)
        ),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
