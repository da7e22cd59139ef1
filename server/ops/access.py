"""The access log: one line for each finished request, with where its time went. Never a query, never prompt text."""

from __future__ import annotations

import logging
from typing import Any

from server.ops.record import RequestRecord

_QUIET_ROUTES = frozenset({"/health", "/v1/health", "/metrics"})  # asked every few seconds by machines

logger = logging.getLogger(__name__)


def log_request(record: RequestRecord, path: str) -> None:
    """`path` is the URL's path alone. Probes are logged at debug level only, server errors as warnings."""
    if record.route in _QUIET_ROUTES:
        level = logging.DEBUG
    elif record.status >= 500:
        level = logging.WARNING
    else:
        level = logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _sentence(record, path), extra={"data": _fields(record, path)})


def _sentence(record: RequestRecord, path: str) -> str:
    parts = [f"{record.method} {path} {record.status} {_ms(record.duration_ms)}"]
    if record.timings:
        first = record.timings[0]
        n_generated = sum(timings.predicted_n for timings in record.timings)
        parts.append(f"queue {_ms(first.queue_ms)}")
        parts.append(f"prefill {_ms(first.prompt_ms)} ({first.prompt_n} new, {first.cache_n} cached)")
        parts.append(f"decode {_ms(max(timings.predicted_ms for timings in record.timings))} ({n_generated} tokens)")
    parts += [word for word in (record.finish_reason, record.error_code) if word]
    if record.disconnected:
        parts.append("client left")
    parts += [word for word in (record.key_label, record.client, record.request_id) if word]
    return " · ".join(parts)


def _fields(record: RequestRecord, path: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "method": record.method,
        "path": path,
        "route": record.route,
        "status": record.status,
        "duration_ms": round(record.duration_ms, 3),
        "client": record.client,
        "key": record.key_label,
        "request_id": record.request_id,
        "stream": record.stream,
        "disconnected": record.disconnected,
        "finish_reason": record.finish_reason,
        "error_code": record.error_code,
    }
    if record.normalized:
        fields["normalized"] = True
    if record.ttft_ms is not None:
        fields["ttft_ms"] = round(record.ttft_ms, 3)
    if record.timings:
        first = record.timings[0]
        fields |= {
            "queue_ms": round(first.queue_ms, 3),
            "prompt_ms": round(first.prompt_ms, 3),
            "prompt_n": first.prompt_n,
            "cache_n": first.cache_n,
            "predicted_ms": round(max(timings.predicted_ms for timings in record.timings), 3),
            "predicted_n": sum(timings.predicted_n for timings in record.timings),
        }
    return fields


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
