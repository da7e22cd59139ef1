"""Options of the ops room: what is logged, how and where. Plain values, no flag names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LogLevel(StrEnum):
    ERROR = "error"
    WARN = "warn"
    INFO = "info"
    DEBUG = "debug"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"  # one object a line


@dataclass(frozen=True, slots=True)
class LogOptions:
    level: LogLevel = LogLevel.INFO  # of our own lines; native lines have EngineOptions.log_level
    format: LogFormat = LogFormat.TEXT
    file: str | None = None  # written besides stderr; None: stderr only
