"""Every request is accounted for: one line in the access log, one count in the metrics, and an id to find it by."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.context import Notes, keep_notes
from server.ops.access import log_request
from server.ops.metrics import Metrics

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class Account:
    """Middleware, outside of all others but the mending of paths."""

    def __init__(self, app: ASGIApp, metrics: Metrics, pattern_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._metrics = metrics
        self._pattern_of = pattern_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        notes = Notes(
            request_id=_request_id(scope),
            client=client[0] if client else "",
            route=self._pattern_of(scope),
            method=scope["method"],
        )
        keep_notes(scope, notes)

        complete = False

        async def send_noting(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                notes.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", notes.request_id.encode())]}
            await send(message)

        self._metrics.request_started(notes.route)
        try:
            await self._app(scope, receive, send_noting)
        except Exception:
            # The router's outermost layer raises what it has answered and logged already (errors.py). Anything else is
            # for the server, which closes the connection.
            if not complete:
                raise
        finally:
            record = notes.record()
            self._metrics.request_finished(record)
            log_request(record, scope["path"])


def _request_id(scope: Scope) -> str:
    """The client's own, where it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)
