"""Is it alive, is it ready, and what is it: the routes that answer without a key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import server
from server.api.context import api_of
from server.api.errors import error_body, error_headers
from server.api.openapi import errors_of_get, gives
from server.api.render.parts import to_json
from server.engine.client import EngineState
from server.errors import Unavailable

router = APIRouter()

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>glmserve</title></head>
<body style="font-family: sans-serif; max-width: 40em; margin: 3em auto">
<h1>glmserve {version}</h1>
<p>An OpenAI-compatible server for GLM models.
The base URL for clients is this page's address followed by <code>{prefix}/v1</code>.</p>
<ul>
<li><code>POST {prefix}/v1/chat/completions</code>, <code>POST {prefix}/v1/completions</code></li>
<li><a href="{prefix}/v1/models">models</a> · <a href="{prefix}/health">health</a> · <a href="{prefix}/props">props</a>
 · <a href="{prefix}/slots">slots</a> · <a href="{prefix}/metrics">metrics</a>
 · <a href="{prefix}/openapi.json">every route</a></li>
</ul>
</body></html>
"""

_OK = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"const": "ok"}},
}


@router.get("/health", responses=gives("Ready.", schema=_OK, errors=(503,)))
@router.get("/v1/health", responses=gives("Ready.", schema=_OK, errors=(503,)))
async def health(request: Request) -> Response:
    api = api_of(request)
    try:
        api.check_ready()
    except Unavailable as error:
        status = api.engine.status
        body = error_body(error)
        body["error"] |= {"state": status.state.value, "restarts": status.restarts}
        if status.phase:
            body["error"]["phase"] = status.phase
        if status.state is EngineState.LOADING:
            body["error"]["message"] = "Loading model"  # llama.cpp's words, which some clients look for
        return Response(to_json(body), 503, error_headers(error), media_type="application/json")
    return Response(to_json({"status": "ok"}), media_type="application/json")


@router.get("/", include_in_schema=False)
async def front_page(request: Request) -> Response:
    return HTMLResponse(_PAGE.format(version=server.__version__, prefix=api_of(request).options.prefix))


@router.get("/v1", responses=gives("What this is.", errors=errors_of_get()))
async def base(request: Request) -> Response:
    """Some clients test their base URL with a GET."""
    api = api_of(request)
    prefix = api.options.prefix
    about = {
        "object": "server",
        "name": "glmserve",
        "version": server.__version__,
        "model": api.model_name,
        "routes": [f"{prefix}/v1/chat/completions", f"{prefix}/v1/completions", f"{prefix}/v1/models"],
    }
    return Response(to_json(about), media_type="application/json")
