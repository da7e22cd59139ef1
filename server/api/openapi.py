"""The OpenAPI schema: what handlers read by themselves is described here, since FastAPI does not see it.

Handlers take the raw request and read the body through `body.py`, so that its errors are ours. `takes` and `gives`
describe bodies and answers; `describe` puts the models into the finished schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import server
from server.api.schemas.chat import ChatRequest, PromptAnswer, PromptRequest, TokenCount
from server.api.schemas.completion import CompletionRequest, NativeRequest
from server.api.schemas.slot import SlotFile
from server.api.schemas.text import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

_MODELS: Sequence[type[BaseModel]] = (
    ChatRequest,
    PromptRequest,
    PromptAnswer,
    TokenCount,
    CompletionRequest,
    NativeRequest,
    TokenizeRequest,
    TokenizeAnswer,
    DetokenizeRequest,
    DetokenizeAnswer,
    SlotFile,
)
_REF = "#/components/schemas/{model}"

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type", "reason"],
            "properties": {
                "code": {"type": "integer", "description": "The HTTP status."},
                "message": {"type": "string"},
                "type": {"type": "string"},
                "reason": {"type": "string", "description": "A stable name of this kind of error."},
                "param": {"type": "string", "description": "The field at fault."},
                "n_prompt_tokens": {"type": "integer"},
                "n_ctx": {"type": "integer"},
                "served": {"type": "array", "items": {"type": "string"}},
                "retry_after": {"type": "integer", "description": "Seconds."},
                "progress": {"type": "number", "description": "0 to 1 while the model loads."},
            },
        }
    },
}
_ERROR_TEXTS = {
    400: "The request is wrong; the message names the field.",
    401: "No valid API key.",
    404: "No such model.",
    409: "The slot is at work.",
    413: "The body is too large.",
    429: "Too many requests are waiting.",
    500: "The engine failed.",
    501: "Not offered by this server.",
    503: "The model is loading, the engine is being restarted, or no slot is free.",
    504: "A time limit of the server was passed.",
}
_ERRORS_OF_GET = (401, 503)
_ERRORS_OF_POST = (400, 401, 413, 503)
ERRORS_OF_GENERATION = (400, 401, 404, 413, 429, 500, 503, 504)


def takes(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """For `openapi_extra`: the route's JSON body."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
    return {"requestBody": {"required": required, "content": content}}


def gives(
    description: str,
    *,
    model: type[BaseModel] | None = None,
    schema: dict[str, Any] | None = None,
    media_types: Sequence[str] = ("application/json",),
    errors: Sequence[int] = (),
) -> dict[int | str, dict[str, Any]]:
    """For `responses`: the answer with status 200, and errors."""
    shape = {"$ref": _REF.format(model=model.__name__)} if model is not None else schema or {"type": "object"}
    content = {media_type: {"schema": shape} if media_type == "application/json" else {} for media_type in media_types}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": description, "content": content}}
    for status in errors:
        answers[status] = {
            "description": _ERROR_TEXTS[status],
            "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
        }
    return answers


def errors_of_get(*more: int) -> tuple[int, ...]:
    return tuple(sorted({*_ERRORS_OF_GET, *more}))


def errors_of_post(*more: int) -> tuple[int, ...]:
    return tuple(sorted({*_ERRORS_OF_POST, *more}))


def describe(app: FastAPI) -> None:
    """Make /openapi.json tell the truth about bodies."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title="glmserve", version=server.__version__, routes=app.routes)
            _, definitions = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            schemas["Error"] = _ERROR
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
