"""Errors become HTTP here: one table of statuses, one form of body.

The body is llama.cpp's, `{"error": {code, message, type}}` with the status as code, plus `reason` (the stable code of
errors.py), `param` where one field is at fault, and counts where there are some.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from server.api.context import notes_of
from server.api.render.parts import frame, to_json
from server.errors import (
    BodyTooLarge,
    Conflict,
    ContextTooLong,
    EngineFailure,
    Forbidden,
    GlmserveError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotSupported,
    QueueFull,
    RequestError,
    Unauthorized,
    Unavailable,
)

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nobody reads it; the access log and the metrics show it


class MethodNotAllowed(RequestError):
    """The route exists, but not with this method."""

    code = "method_not_allowed"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class TimedOut(RequestError):
    """A time limit of the server ended the request; the message names the setting."""

    code = "timeout"


# The first class that fits decides.
_KINDS: tuple[tuple[type[GlmserveError], int, str], ...] = (
    (ContextTooLong, 400, "exceed_context_size_error"),
    (InvalidRequest, 400, "invalid_request_error"),
    (Unauthorized, 401, "authentication_error"),
    (Forbidden, 403, "permission_error"),
    (NotFound, 404, "not_found_error"),
    (MethodNotAllowed, 405, "invalid_request_error"),
    (Conflict, 409, "invalid_request_error"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (QueueFull, 429, "rate_limit_error"),
    (NotSupported, 501, "not_supported_error"),
    (Unavailable, 503, "unavailable_error"),
    (TimedOut, 504, "timeout_error"),
    (EngineFailure, 500, "server_error"),
)


def status_and_type(error: GlmserveError) -> tuple[int, str]:
    return next(((status, name) for kind, status, name in _KINDS if isinstance(error, kind)), (500, "server_error"))


def error_body(error: GlmserveError) -> dict[str, Any]:
    """The whole JSON body."""
    status, name = status_and_type(error)
    inner: dict[str, Any] = {"code": status, "message": error.message, "type": name, "reason": error.code}
    if isinstance(error, RequestError) and error.param is not None:
        inner["param"] = error.param
    match error:
        case ContextTooLong():
            inner |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
        case ModelNotFound():
            inner["served"] = error.served
        case QueueFull():
            inner["retry_after"] = error.retry_after_s
        case Unavailable():
            inner["retry_after"] = error.retry_after_s
            if error.progress is not None:
                inner["progress"] = error.progress
    return {"error": inner}


def error_headers(error: GlmserveError) -> dict[str, str]:
    match error:
        case QueueFull() | Unavailable():
            return {"Retry-After": str(error.retry_after_s)}
        case Unauthorized():
            return {"WWW-Authenticate": "Bearer"}
        case MethodNotAllowed():
            return {"Allow": ", ".join(error.allowed)}
        case _:
            return {}


def error_response(error: GlmserveError) -> Response:
    status, _ = status_and_type(error)
    return Response(to_json(error_body(error)), status, error_headers(error), media_type="application/json")


def error_frame(error: GlmserveError) -> bytes:
    """For a stream whose 200 has been sent."""
    return frame(to_json(error_body(error)))


def internal_error(error: BaseException, doing: str) -> EngineFailure:
    """A fault of ours: the log gets the traceback, the client a sentence without it."""
    logger.error("unexpected error while %s", doing, exc_info=error)
    return EngineFailure("internal error; the server's log has the details")


def register_handlers(app: FastAPI) -> None:
    """JSON for every error that a handler or the router raises."""

    async def on_known(request: Request, error: Exception) -> Response:
        assert isinstance(error, GlmserveError)
        notes_of(request.scope).error_code = error.code
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        """Starlette's own errors, of which routing's are the only ones (404 and 405 are ours, see paths.py)."""
        assert isinstance(error, HTTPException)
        known: GlmserveError = InvalidRequest(str(error.detail))
        notes_of(request.scope).error_code = known.code
        body = error_body(known)
        body["error"]["code"] = error.status_code
        return Response(to_json(body), error.status_code, error.headers, media_type="application/json")

    async def on_fault(request: Request, error: Exception) -> Response:
        notes = notes_of(request.scope)
        failure = internal_error(error, f"serving {notes.method} {notes.route}")
        notes.error_code = failure.code
        return error_response(failure)

    app.add_exception_handler(Exception, on_fault)
    app.add_exception_handler(GlmserveError, on_known)
    app.add_exception_handler(HTTPException, on_http)
