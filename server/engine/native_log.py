"""What the native libraries write: kept for error messages, and passed on to stderr from a level on."""

from __future__ import annotations

import os
import re
from collections import deque
from types import ModuleType
from typing import Any

_DEBUG, _INFO, _WARN, _ERROR, _CONTINUED = 1, 2, 3, 4, 5  # enum ggml_log_level
_LEVELS = {"debug": _DEBUG, "info": _INFO, "warn": _WARN, "error": _ERROR}
_STDERR = 2
_KEPT_LINES = 50
# A line for each tensor of the layer that drafts tokens (NextN), which is not loaded unless it is used.
_EXPECTED = b"model has unused tensor"
_PIPELINED = b"pipeline parallelism enabled"
_FUNCTION_PREFIX = re.compile(r"^[\w:~]+: (?:error loading model: )?")
_OUT_OF_MEMORY = re.compile(r"out of memory|failed to allocate|cannot allocate|unable to allocate", re.IGNORECASE)


class NativeLog:
    """The log callback of llama.cpp and ggml. It is called from any native thread, during decodes too, so it only
    appends and writes; it must stay referenced while installed."""

    def __init__(self, bindings: ModuleType, level: str) -> None:
        self._bindings = bindings
        self._shown_from = _LEVELS.get(level, _WARN)
        self._last_level = _INFO
        self._kept: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self.pipelined = False  # llama.cpp said so of the last context
        self._callback: Any = bindings.llama_log_callback(self._on_text)

    def install(self) -> None:
        """llama_log_set also sets ggml's callback (src/llama.cpp)."""
        self._bindings.llama_log_set(self._callback, None)

    def remove(self) -> None:
        self._bindings.llama_log_set(self._bindings.llama_log_callback(), None)

    def clear(self) -> None:
        self._kept.clear()

    def _on_text(self, level: int, text: bytes, _user_data: int | None) -> None:
        if level == _CONTINUED:
            level = self._last_level
        if text.startswith(_EXPECTED):
            level = _INFO
        if _PIPELINED in text:
            self.pipelined = True
        self._last_level = level
        if level >= _WARN:
            self._kept.append((level, text.decode("utf-8", errors="replace").strip()))
        if level >= self._shown_from:
            os.write(_STDERR, text)

    def warnings(self) -> list[str]:
        return [_bare(line) for level, line in self._kept if level == _WARN]

    def reason(self) -> str:
        """The decisive line, and what to do about it when memory ran out."""
        line = self.decisive_line()
        return f"{line}; use a smaller --ubatch-size, --ctx-size or --parallel" if _OUT_OF_MEMORY.search(line) else line

    def decisive_line(self) -> str:
        """The kept line that says why something failed: the last error, after the allocation that failed, if any."""
        errors = [_bare(line) for level, line in self._kept if level == _ERROR]
        if not errors:
            warnings = self.warnings()
            return warnings[-1] if warnings else "llama.cpp gave no reason"
        cause = next((line for line in errors if _OUT_OF_MEMORY.search(line)), "")
        # "failed to load model" and the like only repeat that something went wrong
        telling = [line for line in errors if not line.startswith("failed to load model")] or errors
        return telling[-1] if not cause or cause == telling[-1] else f"{cause}; {telling[-1]}"


def _bare(line: str) -> str:
    return _FUNCTION_PREFIX.sub("", line, count=1)
