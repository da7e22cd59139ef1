"""What a client may ask of the answer's form, beside its words. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class CallMode(StrEnum):
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names` None: any of the tools. `only_one`: the answer is one call, whatever else was asked."""

    mode: CallMode = CallMode.AUTO
    names: frozenset[str] | None = None
    only_one: bool = False


@dataclass(frozen=True, slots=True)
class JsonForm:
    """JSON of a schema. `strict`: what of the schema cannot be enforced is refused, else told."""

    schema: Mapping[str, Any] | bool
    field: str  # of the request, for messages
    strict: bool = True


@dataclass(frozen=True, slots=True)
class RegexForm:
    """A text that matches as a whole. Rust's syntax: no look-around, no back-references."""

    pattern: str
    field: str


@dataclass(frozen=True, slots=True)
class ChoiceForm:
    choices: tuple[str, ...]
    field: str


@dataclass(frozen=True, slots=True)
class LarkForm:
    """A grammar in llguidance's Lark."""

    grammar: str
    field: str


AnswerForm = JsonForm | RegexForm | ChoiceForm | LarkForm
