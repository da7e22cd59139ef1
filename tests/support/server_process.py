"""The real command as a process on a free port, for end-to-end tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx

ROOT = Path(__file__).resolve().parents[2]
_T = TypeVar("_T")
_BASE_URL = re.compile(r"base URL: (\S+)/v1")


def until(what: str, probe: Callable[[], _T | None], timeout_s: float = 60.0) -> _T:
    """Ask `probe` until it gives something true; what it gave. The deadline is there for a broken server only."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        got = probe()
        if got:
            return got
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s for {what}")


def children_of(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(child) for child in text.split()]


def runs_engine(pid: int) -> bool:
    try:
        return b"server.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_alive(pid: int) -> bool:
    """Running, not merely a zombie that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class ServerProcess:
    """`python -m server ARGUMENTS --port 0`; a context manager that leaves nothing behind."""

    def __init__(self, *arguments: str, wait: bool = True, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "server", *arguments]
        if "--port" not in arguments:
            command += ["--port", "0"]
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine_pid(self) -> int | None:
        """Only once the child runs the engine's program: stopped or killed between fork and exec, it would hold up the
        parent, which waits for the exec."""
        return next((child for child in children_of(self.pid) if runs_engine(child)), None)

    @property
    def url(self) -> str:
        """Known once the server has said that it is ready."""
        return until("the base URL", self._find_url)

    def _find_url(self) -> str | None:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output}")
        found = _BASE_URL.search(self.output)
        return found[1] if found else None

    def wait_ready(self) -> None:
        until("health", self.is_healthy)

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_end(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM and wait. The exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait_end(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.wait_end()
            raise AssertionError(f"the server did not stop:\n{self.output}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self.engine_pid
        if self.process.poll() is None:
            self.process.kill()
        self.wait_end()
        if engine is not None:
            until("the engine to go with the server", lambda: not is_alive(engine), 10)


def run_to_end(arguments: Sequence[str], timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit code and all output of a command that is expected to end by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout
