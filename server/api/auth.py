"""API keys: Bearer or x-api-key, compared in constant time, never logged."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.context import notes_of
from server.api.errors import error_response
from server.api.options import ApiKey
from server.errors import Unauthorized

PUBLIC_PATHS = ("/", "/health", "/v1/health")


class Authenticate:
    """Middleware. Without keys everybody may ask. Browsers send preflights without credentials, so those pass."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], prefix: str) -> None:
        self._app = app
        self._keys = [(key.secret.encode(), key) for key in keys]
        self._public = {prefix + path for path in PUBLIC_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._public or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        key = self._key(scope)
        notes = notes_of(scope)
        if key is None:
            error = Unauthorized(
                "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
            notes.error_code = error.code
            await error_response(error)(scope, receive, send)
            return
        notes.key = key
        await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> ApiKey | None:
        """None when no header has a valid one. Every key is compared with every candidate, so that the time taken says
        nothing about which one fits."""
        found: ApiKey | None = None
        for candidate in _candidates(scope):
            for secret, key in self._keys:
                if hmac.compare_digest(candidate, secret):
                    found = key
        return found


def _candidates(scope: Scope) -> list[bytes]:
    candidates: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            candidates.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            candidates.append(value[7:].strip())
    return candidates
