"""What is known of one request when it is over. The metrics count it, the access log writes it."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.messages import Timings


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are milliseconds as the HTTP side saw them; the engine's own clocks are in `timings`. No text of the client
    but the path is in it, and that without its query."""

    route: str  # the route's pattern ("/v1/models/{model}"), never the raw path; "other" when no route matched
    status: int  # HTTP status sent; 499 when the client left before one was sent
    duration_ms: float  # from the request's arrival to the last byte
    method: str = ""
    client: str = ""  # address
    key_label: str = ""  # which of the server's keys ("key 2"), never the key
    request_id: str = ""
    stream: bool = False
    disconnected: bool = False  # the client left before the answer was complete
    normalized: bool = False  # something that changes with each request was left out of the prompt
    finish_reason: str = ""  # as sent: stop, length, tool_calls
    error_code: str = ""  # GlmserveError.code of what ended the request
    ttft_ms: float | None = None  # to the first delta; None: the request generated nothing
    timings: tuple[Timings, ...] = ()  # one for each choice
