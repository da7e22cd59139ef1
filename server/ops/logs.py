"""Sets Python's logging up: text for people or one JSON object a line, with secrets blotted out. Never prompt text.

Modules log with `logging.getLogger(__name__)`. Values that a program should find go into `extra={"data": {...}}`: JSON
lines carry them as fields, text lines leave them to the message.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from server.errors import ConfigError
from server.ops.options import LogFormat, LogLevel, LogOptions

_LEVELS: Final = {
    LogLevel.ERROR: logging.ERROR,
    LogLevel.WARN: logging.WARNING,
    LogLevel.INFO: logging.INFO,
    LogLevel.DEBUG: logging.DEBUG,
}
_NAMES: Final = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warn", logging.ERROR: "error"}
_COLOURS: Final = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31;1"}

# what looks like a credential even if nobody told us about it
_CREDENTIAL: Final = re.compile(
    r"""(?ix) (?P<keep> \b (?: bearer\s+ | (?:x-)?api[-_]key ["']? \s* [:=] \s* ["']? ) ) [^\s"',;]+
    | \b (?: sk-[\w-]{8,} | hf_\w{8,} )"""
)
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))} | {ord("\t"): "\t"}


def set_up_logging(options: LogOptions, *, secrets: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr) and, if asked, to a file. `secrets` never appear in a line. Calling it again replaces
    what the last call set up. Raises ConfigError when the file cannot be written."""
    blot = Blot(secrets)
    stream = sys.stderr if stream is None else stream
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    formatters = [_formatter(options.format, blot, coloured=stream.isatty(), dated=False)]
    if options.file is not None:
        try:
            handlers.append(logging.handlers.WatchedFileHandler(options.file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"the log file '{options.file}' cannot be written: {error.strerror}; make it writable or choose another"
            ) from error
        formatters.append(_formatter(options.format, blot, coloured=False, dated=True))

    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            root.removeHandler(handler)
            handler.close()
    for handler, formatter in zip(handlers, formatters, strict=True):
        handler.setFormatter(formatter)
        root.addHandler(handler)

    level = _LEVELS[options.level]
    root.setLevel(max(level, logging.WARNING))  # other people's libraries
    logging.getLogger("server").setLevel(level)
    # uvicorn's own start and stop lines repeat what app.py says, its access log what access.py says
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"
        logger.setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
    logging.captureWarnings(True)


class Blot:
    """Replaces known secrets, and what looks like one, by asterisks."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub("***", text)
        return _CREDENTIAL.sub(lambda match: f"{match['keep'] or ''}***", text)


class TextFormatter(logging.Formatter):
    """`12:30:01.123 info  engine  message`; control characters are written as escapes, so that a line stays a line."""

    def __init__(self, blot: Blot, *, coloured: bool, dated: bool) -> None:
        super().__init__()
        self._blot = blot
        self._coloured = coloured
        self._dated = dated

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone()
        time = moment.isoformat(timespec="milliseconds") if self._dated else f"{moment:%H:%M:%S.%f}"[:-3]
        level = f"{_NAMES.get(record.levelno, 'error'):5}"
        if self._coloured and record.levelno in _COLOURS:
            level = f"\x1b[{_COLOURS[record.levelno]}m{level}\x1b[0m"
        message = self._blot(record.getMessage()).translate(_CONTROL)
        line = f"{time} {level} {_room(record.name):7} {message}"
        return "\n".join([line, *filter(None, [self._trace(record)])])

    def _trace(self, record: logging.LogRecord) -> str:
        return self._blot(self.formatException(record.exc_info)) if record.exc_info else ""


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, the fields of `data`, `trace` after an error."""

    def __init__(self, blot: Blot) -> None:
        super().__init__()
        self._blot = blot

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _NAMES.get(record.levelno, "error"),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in getattr(record, "data", {}).items() if name not in line}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps({name: self._clean(value) for name, value in line.items()}, ensure_ascii=False, default=str)

    def _clean(self, value: Any) -> Any:
        return self._blot(value) if isinstance(value, str) else value


def _formatter(kind: LogFormat, blot: Blot, *, coloured: bool, dated: bool) -> logging.Formatter:
    match kind:
        case LogFormat.TEXT:
            return TextFormatter(blot, coloured=coloured, dated=dated)
        case LogFormat.JSON:
            return JsonFormatter(blot)


def _room(logger: str) -> str:
    """`engine` for server.engine.client; the first name of other people's loggers."""
    first, _, rest = logger.partition(".")
    return rest.partition(".")[0] if first == "server" and rest else first
