"""API keys: Bearer or x-api-key, compared in constant time, never logged."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.context import notes_of
from server.api.errors import error_response
from server.errors import Unauthorized

PUBLIC_PATHS = ("/", "/health", "/v1/health")


class Authenticate:
    """Middleware. Without keys everybody may ask. Browsers send preflights without credentials, so those pass."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], prefix: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._public = {prefix + path for path in PUBLIC_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._public or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        label = self._label(scope)
        notes = notes_of(scope)
        if label is None:
            error = Unauthorized(
                "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
            notes.error_code = error.code
            await error_response(error)(scope, receive, send)
            return
        notes.key_label = label
        await self._app(scope, receive, send)

    def _label(self, scope: Scope) -> str | None:
        """ "key N" for the Nth of our keys; None when no header has a valid one. Every key is compared with every
        candidate, so that the time taken says nothing about which one fits."""
        label: str | None = None
        for candidate in _candidates(scope):
            for number, key in enumerate(self._keys, 1):
                if hmac.compare_digest(candidate, key):
                    label = f"key {number}"
        return label


def _candidates(scope: Scope) -> list[bytes]:
    candidates: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            candidates.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            candidates.append(value[7:].strip())
    return candidates
