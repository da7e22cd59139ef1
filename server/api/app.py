"""Puts the HTTP side together: routes, middleware, error handlers, schema."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from server.api import explain
from server.api.account import Account
from server.api.auth import Authenticate
from server.api.context import Api, notes_of
from server.api.errors import CLIENT_LEFT, register_handlers
from server.api.openapi import describe
from server.api.options import CorsOptions, HttpOptions
from server.api.paths import Fallback, MendPaths, RouteTable
from server.api.routes import chat, completions, health, models, state, text
from server.engine.client import EngineClient
from server.ops.metrics import Metrics
from server.service import ChatService

_LOCAL_ORIGIN = r"https?://(localhost|[^/:@]+\.localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"


def create_api(
    service: ChatService, engine: EngineClient, metrics: Metrics, options: HttpOptions, *, model_path: str = ""
) -> ASGIApp:
    """The ASGI application. A request passes, in this order: path mending, accounting, CORS, keys, router."""
    app = FastAPI(title="glmserve", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.api = Api(service, engine, metrics, options, started_at=int(time.time()), model_path=model_path)
    routers = [family.router for family in (chat, completions, text, models, health, state)]
    for router in routers:
        app.include_router(router, prefix=options.prefix)
    describe(app)
    register_handlers(app)
    app.add_exception_handler(ClientDisconnect, _client_left)

    async def openapi(_: Request) -> Response:
        return JSONResponse(app.openapi())

    table = RouteTable(routers, options.prefix)
    app.router.routes.append(Route(f"{options.prefix}/openapi.json", openapi, include_in_schema=False))
    app.router.routes.append(Route("/{path:path}", Fallback(table), include_in_schema=False))

    wrapped: ASGIApp = Authenticate(app, options.api_keys, options.prefix)
    wrapped = _cors(wrapped, options.cors)
    wrapped = Account(wrapped, metrics, table.pattern_of)
    return MendPaths(wrapped, options.prefix)


def _cors(app: ASGIApp, options: CorsOptions) -> ASGIApp:
    """With credentials, browsers want their own origin named instead of `*`, so it is echoed."""
    if not options.origins:
        return app
    any_origin = "*" in options.origins
    local = "localhost" in options.origins
    pattern = ".*" if any_origin and options.credentials else _LOCAL_ORIGIN if local and not any_origin else None
    return CORSMiddleware(
        app,
        allow_origins=["*"] if any_origin and not options.credentials else [o for o in options.origins if "/" in o],
        allow_origin_regex=pattern,
        allow_methods=list(options.methods),
        allow_headers=list(options.headers),
        allow_credentials=options.credentials,
        expose_headers=["Retry-After", "X-Request-Id", explain.HEADER],
    )


async def _client_left(request: Request, error: Exception) -> Response:
    """While its body was read, or its question answered: nobody will read this."""
    notes_of(request.scope).disconnected = True
    return Response(status_code=CLIENT_LEFT)
