"""The kinds of field that request bodies are made of, and how a wrong one is told.

Numbers follow llama.cpp: a field with a soft limit is clamped, one with a hard limit is refused. `null` always means
that the field was not given.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from server.errors import InvalidRequest

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4e38  # llama.cpp samples with 32-bit floats; more would become infinite there

_SHOWN = 80  # characters of a wrong value that a message quotes


class Body(BaseModel):
    """Base of all bodies. Wrong types are refused, never converted; fields that nobody knows are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


def _integral(value: Any) -> Any:
    """Some clients write integers as 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _clamp(low: float, high: float) -> AfterValidator:
    return AfterValidator(lambda value: None if value is None else min(max(value, low), high))


Int32 = Annotated[int, BeforeValidator(_integral), Field(ge=-INT32_MAX - 1, le=INT32_MAX)]
Count = Annotated[int, BeforeValidator(_integral), Field(ge=0, le=INT32_MAX)]
CountOrAll = Annotated[int, BeforeValidator(_integral), Field(ge=-1, le=INT32_MAX)]
Int64 = Annotated[int, BeforeValidator(_integral), Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
SoftCount = Annotated[Int64, _clamp(0, INT32_MAX)]
Number = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
SoftShare = Annotated[Number, _clamp(0.0, 1.0)]
SoftPositive = Annotated[Number, _clamp(0.0, FLOAT32_MAX)]


def refuse(field: str, message: str) -> InvalidRequest:
    """The error for one field; raise it."""
    return InvalidRequest(f"Field '{field}': {message}", param=field)


def shown(value: Any) -> str:
    """A wrong value, short enough for a message."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxlong = brief.maxother = _SHOWN
    return brief.repr(value)


def first_problem(error: ValidationError, inside: str = "") -> InvalidRequest:
    """The first thing that pydantic found wrong, in our words. `inside`: path of the value that was checked."""
    problem = error.errors(include_url=False)[0]
    field = _path(problem["loc"], inside)
    match problem["type"]:
        case "missing":
            return refuse(field, "is required")
        case "too_short":
            return refuse(field, f"must have at least {problem['ctx']['min_length']} item")
        case "model_type" | "dict_type":
            return refuse(field, f"must be an object, but got {shown(problem['input'])}")
        case "value_error":  # one of ours, which says everything
            return refuse(field, problem["msg"].removeprefix("Value error, "))
        case _:
            message = problem["msg"].replace("Input should be", "must be")
            return refuse(field, f"{message}, but got {shown(problem['input'])}")


def _path(location: tuple[int | str, ...], inside: str) -> str:
    path = inside
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or "body"


def given(**fields: Any) -> dict[str, Any]:
    """Only the fields that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def first_given(*values: Any) -> Any:
    """Of several names for one thing, the value of the first that was given."""
    return next((value for value in values if value is not None), None)


def refuse_unsupported(
    raw: Mapping[str, Any], rules: Mapping[str, str], harmless: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises InvalidRequest for a field that asks for something this server cannot do. `rules` says what to tell;
    `harmless` lists values that ask for nothing. null, false, empty text, list and object never do."""
    for field, message in rules.items():
        value = raw.get(field)
        if value is None or value is False or value in ("", [], {}):
            continue
        if value not in harmless.get(field, ()):
            raise refuse(field, message)
