"""What a person sees while the server starts: how far the load is, then where it answers and a request to paste."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from server.engine.client import EngineState, EngineStatus
from server.engine.messages import ModelFacts

logger = logging.getLogger(__name__)

_BAR_WIDTH = 30
_LINE_EVERY_S = 10.0  # where the output is no terminal

QUESTION = "Name the capital of France."  # even the smallest model knows


class LoadProgress:
    """Shows the engine's load: one line that is rewritten on a terminal, else a log line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty()
        self._open = False
        self._said = ""
        self._said_at = 0.0

    def show(self, status: EngineStatus) -> None:
        if status.state not in (EngineState.LOADING, EngineState.RESTARTING) or status.progress is None:
            self.clear()
            return
        if self._rewrites:
            n_full = round(status.progress * _BAR_WIDTH)
            bar = "█" * n_full + "░" * (_BAR_WIDTH - n_full)
            self._stream.write(f"\r\x1b[K{status.phase:22} {bar} {status.progress:4.0%}")
            self._stream.flush()
            self._open = True
            return
        now = time.monotonic()
        if status.phase != self._said or now - self._said_at >= _LINE_EVERY_S:
            percent = f" {status.progress:.0%}" if 0 < status.progress < 1 else ""
            logger.info("%s%s", status.phase, percent)
            self._said, self._said_at = status.phase, now

    def clear(self) -> None:
        if self._open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._open = False


_PLAN_CAME_TRUE = 0.02  # a larger share of difference is told


def ready_lines(facts: ModelFacts, names: tuple[str, ...], url: str, seconds: float, *, needs_key: bool) -> list[str]:
    """The lines after a load. Every number is what the engine reported."""
    where = ", ".join(device.name for device in facts.devices if device.kind != "cpu") or "CPU"
    slots = "1 slot" if facts.n_slots == 1 else f"{facts.n_slots} slots"
    cache = "one cache for all" if facts.kv_unified else "a cache of its own for each slot"
    aliases = f" (also {', '.join(names[1:])})" if len(names) > 1 else ""
    model = f"{facts.architecture}, {_count(facts.n_params)} parameters, {facts.ftype}, {_size(facts.size_bytes)}"
    return [
        f"ready in {seconds:.1f} s: {model}, on {where}",
        f"{slots}, {facts.n_ctx_seq:,} tokens per request (prompt and answer), {cache}",
        f"model name: {names[0]}{aliases}   base URL: {url}/v1" + ("   an API key is needed" if needs_key else ""),
    ]


def memory_lines(facts: ModelFacts) -> list[str]:
    """Where llama.cpp holds more than was planned, or much less; nothing where the plan came true."""
    lines = []
    for memory in facts.memory:
        planned, actual = memory.planned_bytes, memory.actual_bytes
        if actual is not None and abs(actual - planned) > _PLAN_CAME_TRUE * planned and actual + planned > 2**24:
            lines.append(f"memory: {memory.device} holds {_size(actual)}, {_size(planned)} were planned")
    return lines


def curl_line(model: str, url: str, *, key: bool, ca_unknown: bool = False) -> str:
    """A request to paste into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    parts = [
        "curl" + (" -k" if ca_unknown else ""),
        f"{url}/v1/chat/completions",
        "-H 'Content-Type: application/json'",
    ]
    if key:
        parts.append("-H 'Authorization: Bearer YOUR-KEY'")
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return " ".join([*parts, f"-d '{quoted}'"])


def _count(n: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,}"


def _size(n_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 2**10:.0f} KiB"


def say(lines: list[str], stream: TextIO | None = None) -> None:
    """To the terminal, beside the log: these lines are for the person who started the server."""
    stream = sys.stderr if stream is None else stream
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()
