"""Which route a request means: small mistakes in URLs are mended, others are answered with the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.context import notes_of
from server.api.errors import MethodNotAllowed, error_response
from server.errors import GlmserveError, NotFound, NotSupported

OTHER = "other"  # the route of requests that none matches

_NOT_OFFERED = "this server generates text only"
# What llama.cpp's server or OpenAI's API has and this server has not.
_UNSUPPORTED = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/messages/count_tokens": "use /v1/chat/completions/input_tokens",
    "/v1/embeddings": _NOT_OFFERED,
    "/embeddings": _NOT_OFFERED,
    "/embedding": _NOT_OFFERED,
    "/v1/rerank": _NOT_OFFERED,
    "/v1/reranking": _NOT_OFFERED,
    "/rerank": _NOT_OFFERED,
    "/reranking": _NOT_OFFERED,
    "/infill": _NOT_OFFERED,
    "/lora-adapters": "LoRA adapters are not supported",
    "/v1/audio/transcriptions": _NOT_OFFERED,
    "/v1/audio/speech": _NOT_OFFERED,
    "/v1/images/generations": _NOT_OFFERED,
    "/v1/chat/completions/control": "reasoning cannot be ended from outside yet",
    "/v1/streams/lookup": "streams are not kept for replay",
}


class MendPaths:
    """Middleware: `//v1/models/` is `/v1/models`, `/v1/v1/…` is `/v1/…` (a base URL with one /v1 too many), and HEAD is
    answered like GET without the body."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix
        self._doubled = f"{prefix}/v1/v1/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            mended = re.sub("/{2,}", "/", path)
            if len(mended) > 1 and mended.endswith("/"):
                mended = mended[:-1]
            while mended.startswith(self._doubled) or mended == self._doubled[:-1]:
                mended = self._prefix + mended[len(self._prefix) + len("/v1") :]
            if mended == self._prefix:
                mended += "/"
            head = scope["method"] == "HEAD"
            if mended != path or head:
                scope = {**scope, "path": mended, "method": "GET" if head else scope["method"]}
            if head:
                send = _without_body(send)
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


@dataclass(frozen=True, slots=True)
class _Known:
    pattern: str  # without the server's prefix
    regex: re.Pattern[str]
    methods: frozenset[str]


class RouteTable:
    """Knows the routes of some routers by pattern."""

    def __init__(self, routers: Iterable[APIRouter], prefix: str) -> None:
        self._prefix = prefix
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._known = [
            _Known(
                re.sub(r":\w+}", "}", route.path), compile_path(prefix + route.path)[0], frozenset(route.methods or ())
            )
            for route in routes
        ]

    def pattern_of(self, scope: Scope) -> str:
        """The pattern of the route that takes the request; "other" for none."""
        fitting = (known for known in self._known_at(scope["path"]) if scope["method"] in known.methods)
        return next((known.pattern for known in fitting), OTHER)

    def error_for(self, scope: Scope) -> GlmserveError:
        """Why no route takes the request, and what would."""
        method, path = scope["method"], scope["path"]
        methods = {method for known in self._known_at(path) for method in known.methods}
        if methods:
            allowed = tuple(sorted(methods))
            return MethodNotAllowed(f"{path} does not take {method}; use {' or '.join(allowed)}", allowed)
        local = path.removeprefix(self._prefix)
        if local in _UNSUPPORTED:
            return NotSupported(f"{path} is not served: {_UNSUPPORTED[local]}")
        return NotFound(f"there is no {path} here; {self._suggestion(local)}")

    def _known_at(self, path: str) -> list[_Known]:
        return [known for known in self._known if known.regex.match(path)]

    def _suggestion(self, path: str) -> str:
        near = _nearest(path.lower(), [known.pattern for known in self._known if "{" not in known.pattern])
        if near is None:
            return f"the base URL for OpenAI clients ends in {self._prefix}/v1, and {self._prefix}/ lists the routes"
        methods = {method for known in self._known if known.pattern == near for method in known.methods}
        return f"did you mean {' or '.join(sorted(methods))} {self._prefix}{near}?"


def _nearest(path: str, patterns: Sequence[str]) -> str | None:
    """A base URL without /v1, or with an /api before it, is the usual mistake; after that, typing errors."""
    for guess in (path, f"/v1{path}", path.removeprefix("/api"), f"/v1{path.removeprefix('/api')}"):
        if guess in patterns:
            return guess
    return next(iter(difflib.get_close_matches(path, patterns, n=1, cutoff=0.6)), None)


class Fallback:
    """ASGI endpoint of everything that no route takes."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._table.error_for(scope)
        notes_of(scope).error_code = error.code
        await error_response(error)(scope, receive, send)
