"""Writes grammars in llguidance's Lark: rules (lower case), terminals (upper case), JSON schemas in between.

A terminal is described by an expression: literals in quotes, regular expressions in slashes, joined by `|` (or), `&`
(and) and `~` (not). Equal ones are written once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

ANYTHING = "/(?s:.*)/"
NOTHING_LEFT = '""'  # the empty text

# Between the tokens of JSON. Without a limit a model that is at a loss can write blanks for ever.
JSON_BLANKS = r"( |\r?\n{1,2}[ \t]{0,80})"
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression in Rust's syntax as an expression."""
    return "/" + _SLASH.sub(lambda found: found.group(1) or r"\/", pattern).replace("\n", r"\n") + "/"


def either(expressions: Iterable[str]) -> str:
    """At least one expression."""
    distinct = list(dict.fromkeys(expressions))
    return distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"


class Lark:
    """One grammar. `lenient`: what llguidance cannot enforce of JSON schemas is left out, and it tells what."""

    def __init__(self, *, lenient: bool) -> None:
        self._lenient = lenient
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}

    def rule(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def terminal(self, expression: str) -> str:
        """A name for the expression."""
        if "~" in expression:
            expression = f"{ANYTHING} & {expression}"  # a complement has invalid UTF-8 in it too
        return self._named("T", expression)

    def named(self, body: str) -> str:
        """A name for a rule."""
        return self._named("r", body)

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """A name for the JSON texts of a schema."""
        document: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {"allOf": [schema]}
        settings: dict[str, Any] = {"whitespace_pattern": JSON_BLANKS}
        if self._lenient:
            settings |= {"lenient": True, "coerce_one_of": True}
        document["x-guidance"] = settings
        return self._named("j", "%json " + json.dumps(document, ensure_ascii=False))

    def text(self) -> str:
        return "%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def _named(self, prefix: str, body: str) -> str:
        key = (prefix, body)
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}"
            self._rules[self._names[key]] = body
        return self._names[key]
