"""Reads a request's body: never more than is allowed, strictly JSON, and into the model of its route."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from server.api.context import api_of
from server.api.schemas.fields import Body, first_problem
from server.errors import BodyTooLarge, InvalidRequest

MAX_DEPTH = 128  # levels of nesting: more than any schema has, and far from Python's limit
_BOM = b"\xef\xbb\xbf"
_TRUNCATED = "Input data was truncated"  # msgspec's words
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")

B = TypeVar("B", bound=Body)


async def read_body(request: Request, model: type[B]) -> B:
    """Raises InvalidRequest, BodyTooLarge, or ClientDisconnect. The Content-Type does not matter if it is JSON."""
    limit = api_of(request).options.max_body_bytes
    raw = decode(await _read(request, limit))
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise first_problem(error) from error


async def _read(request: Request, limit: int) -> bytes:
    """The raw body. A body that says it is too large is not read at all."""
    too_large = BodyTooLarge(f"the request body may have {limit} bytes at most (--max-body-mib)")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def decode(body: bytes) -> dict[str, Any]:
    """A JSON object. NaN, Infinity, half surrogate pairs and anything after the object are refused."""
    try:
        value = msgspec.json.decode(body.removeprefix(_BOM))
    except (msgspec.DecodeError, ValueError) as error:
        if not body.strip():
            raise InvalidRequest("the request body is empty, but must be a JSON object") from error
        raise InvalidRequest(
            f"the request body ({len(body)} bytes) is not valid JSON: {_reason(error, body)}"
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, but it is {_kind_of(value)}")
    if _is_deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _reason(error: Exception, body: bytes) -> str:
    """The decoder takes half of a surrogate pair at the end of a text for the end of all."""
    if str(error) == _TRUNCATED and _HALF_PAIR.search(body):
        return "a text holds half of a UTF-16 surrogate pair"
    return str(error)


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the JSON of the request body is nested too deeply; {MAX_DEPTH} levels are allowed")


def _kind_of(value: object) -> str:
    """What JSON calls a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return "an array"


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
