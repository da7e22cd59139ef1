"""server/ops/access.py: one line for each request."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from server.engine.messages import Timings
from server.ops.access import log_request
from server.ops.record import RequestRecord

CHAT = RequestRecord(
    route="/v1/chat/completions",
    status=200,
    duration_ms=1234.4,
    method="POST",
    client="127.0.0.1",
    request_id="chatcmpl-7",
    stream=True,
    finish_reason="stop",
    ttft_ms=230.0,
    timings=(
        Timings(cache_n=200, prompt_n=812, prompt_ms=220.0, predicted_n=64, predicted_ms=980.0, queue_ms=3.21),
        Timings(cache_n=1012, prompt_n=0, prompt_ms=0.0, predicted_n=36, predicted_ms=990.0, queue_ms=4.0),
    ),
)


def logged(caplog: pytest.LogCaptureFixture, record: RequestRecord, path: str) -> list[logging.LogRecord]:
    caplog.set_level(logging.DEBUG, logger="server")
    log_request(record, path)
    return caplog.records


def test_where_the_time_went(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = logged(caplog, CHAT, "/v1/chat/completions")
    assert line.getMessage() == (
        "POST /v1/chat/completions 200 1234 ms · queue 3.2 ms · prefill 220 ms (812 new, 200 cached) · "
        "decode 990 ms (100 tokens) · stop · 127.0.0.1 · chatcmpl-7"
    )
    data = line.__dict__["data"]
    assert data["queue_ms"] == 3.21
    assert data["ttft_ms"] == 230.0
    assert data["predicted_n"] == 100


def test_a_request_that_generates_nothing_has_no_clocks(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(route="/v1/models", status=200, duration_ms=1.25, method="GET")
    (line,) = logged(caplog, record, "/v1/models")
    assert line.getMessage() == "GET /v1/models 200 1.2 ms"
    assert not {"queue_ms", "ttft_ms", "prompt_n"} & line.__dict__["data"].keys()


def test_a_client_that_left_and_an_error(caplog: pytest.LogCaptureFixture) -> None:
    record = dataclasses.replace(CHAT, timings=(), status=499, disconnected=True, error_code="x", finish_reason="")
    (line,) = logged(caplog, record, "/v1/chat/completions")
    assert line.getMessage() == "POST /v1/chat/completions 499 1234 ms · x · client left · 127.0.0.1 · chatcmpl-7"


@pytest.mark.parametrize(
    ("route", "status", "level"),
    [
        ("/v1/models", 200, logging.INFO),
        ("/v1/models", 404, logging.INFO),
        ("/v1/completions", 503, logging.WARNING),
        ("/health", 503, logging.DEBUG),
        ("/metrics", 200, logging.DEBUG),
    ],
)
def test_level(caplog: pytest.LogCaptureFixture, route: str, status: int, level: int) -> None:
    (line,) = logged(caplog, RequestRecord(route=route, status=status, duration_ms=1.0), route)
    assert line.levelno == level


def test_a_level_that_is_off_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="server")
    log_request(RequestRecord(route="/health", status=200, duration_ms=1.0), "/health")
    assert caplog.records == []
