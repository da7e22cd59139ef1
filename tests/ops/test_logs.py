"""server/ops/logs.py: what a line looks like, and what never gets into one."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.errors import ConfigError
from server.ops.logs import Blot, JsonFormatter, TextFormatter, set_up_logging
from server.ops.options import LogFormat, LogLevel, LogOptions

LOGGERS = ("", "server", "uvicorn", "uvicorn.error", "uvicorn.access")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_left_as_it_was() -> Iterator[None]:
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in LOGGERS}
    yield
    logging.captureWarnings(False)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            root.removeHandler(handler)
            handler.close()
    for name, (level, propagate) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = propagate


def lines(options: LogOptions, *records: tuple[str, int, str], secrets: tuple[str, ...] = ()) -> list[str]:
    stream = io.StringIO()
    set_up_logging(options, secrets=secrets, stream=stream)
    for name, level, message in records:
        logging.getLogger(name).log(level, "%s", message)
    return stream.getvalue().splitlines()


def test_a_text_line_has_time_level_room_and_message() -> None:
    (line,) = lines(LogOptions(), ("server.engine.client", logging.INFO, "ready"))
    time, level, room, message = line.split()
    assert (level, room, message) == ("info", "engine", "ready")
    assert len(time) == len("12:30:01.123")


def test_text_columns_are_aligned() -> None:
    first, second = lines(
        LogOptions(), ("server.api.auth", logging.WARNING, "MARK"), ("server.service", logging.INFO, "MARK")
    )
    assert first.index("MARK") == second.index("MARK")


def test_colours_only_on_a_terminal() -> None:
    terminal = Terminal()
    set_up_logging(LogOptions(), stream=terminal)
    logging.getLogger("server.app").warning("x")
    assert "\x1b[33mwarn \x1b[0m" in terminal.getvalue()
    assert "\x1b" not in lines(LogOptions(), ("server.app", logging.WARNING, "x"))[0]


def test_control_characters_of_a_client_cannot_forge_a_line() -> None:
    (line,) = lines(LogOptions(), ("server.api", logging.INFO, "GET /a\n12:00:00.000 info api forged\x1b[2J\x7f"))
    assert r"/a\x0a12:00:00.000 info api forged\x1b[2J\x7f" in line


def test_a_trace_follows_its_message() -> None:
    stream = io.StringIO()
    set_up_logging(LogOptions(), stream=stream)
    try:
        raise ValueError("Bearer abc123")
    except ValueError:
        logging.getLogger("server.app").exception("it broke")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("it broke")
    assert rest[-1] == "ValueError: Bearer ***"


def test_a_json_line_is_one_object_with_the_fields_of_data() -> None:
    stream = io.StringIO()
    set_up_logging(LogOptions(format=LogFormat.JSON), secrets=["topsecret"], stream=stream)
    data: dict[str, Any] = {"status": 200, "path": "/x?topsecret", "message": "cannot overwrite"}
    logging.getLogger("server.ops.access").info("two\nlines", extra={"data": data})
    (text,) = stream.getvalue().splitlines()
    line = json.loads(text)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "server.ops.access",
        "message": "two\nlines",
        "status": 200,
        "path": "/x?***",
    }


def test_a_json_line_carries_the_trace() -> None:
    formatter = JsonFormatter(Blot())
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("server.app", logging.ERROR, "", 1, "broke", None, sys.exc_info())
    line = json.loads(formatter.format(record))
    assert line["trace"].endswith("ValueError: bad")


@pytest.mark.parametrize(
    "text",
    [
        "key topsecret was wrong",
        "Authorization: Bearer topsecret",
        "authorization: bearer some.other-token=",
        "x-api-key: some-other-token",
        '{"api_key": "some-other-token"}',
        "sk-live_abcdefgh12345",
        "token hf_abcdefgh12345",
    ],
)
@pytest.mark.parametrize("form", list(LogFormat))
def test_secrets_are_blotted_out(text: str, form: LogFormat) -> None:
    (line,) = lines(LogOptions(format=form), ("server.api", logging.INFO, text), secrets=("topsecret",))
    assert "***" in line
    assert not any(secret in line for secret in ("topsecret", "some-other", "some.other", "abcdefgh12345"))


def test_ordinary_words_stay() -> None:
    text = "the bearer of the risk-taking api is keyed; skim hf_hub"
    assert Blot(["", "zzz"])("monkey " + text).startswith("monkey the ")
    assert Blot()("risk-takingpeople hf_hub") == "risk-takingpeople hf_hub"


def test_the_longest_of_overlapping_secrets_is_hidden_whole() -> None:
    assert Blot(["abc", "abcdef"])("abcdef abc") == "*** ***"


def test_levels() -> None:
    got = lines(
        LogOptions(level=LogLevel.WARN),
        ("server.app", logging.INFO, "hidden"),
        ("server.app", logging.WARNING, "shown"),
        ("httpx", logging.INFO, "hidden"),
        ("httpx", logging.WARNING, "foreign"),
    )
    assert [line.split()[-1] for line in got] == ["shown", "foreign"]


def test_uvicorn_goes_through_us_without_its_chatter() -> None:
    got = lines(
        LogOptions(),
        ("uvicorn.error", logging.INFO, "Started server process"),
        ("uvicorn.error", logging.ERROR, "broken"),
        ("uvicorn.access", logging.INFO, "GET /"),
    )
    assert [line.split()[1:] for line in got] == [["error", "uvicorn", "broken"]]


def test_setting_up_twice_writes_each_line_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logging(LogOptions(), stream=first)
    set_up_logging(LogOptions(), stream=second)
    logging.getLogger("server.app").info("x")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_a_file_gets_dated_lines_without_colours(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    terminal = Terminal()
    set_up_logging(LogOptions(file=str(path)), stream=terminal)
    logging.getLogger("server.app").error("x")
    line = path.read_text(encoding="utf-8")
    assert line[4] == line[7] == "-"
    assert "\x1b" not in line
    assert "\x1b" in terminal.getvalue()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "none" / "server.log"
    with pytest.raises(ConfigError, match=f"the log file '{path}' cannot be written: No such file or directory; "):
        set_up_logging(LogOptions(file=str(path)), stream=io.StringIO())
