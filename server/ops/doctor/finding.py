"""What a check found, what a check may look at, and the order of the checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

_PATIENCE_S = 120.0  # a first touch of eight GPUs without persistence mode takes a while


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`way_out` is what to do; empty only where all is well."""

    check: str
    verdict: Verdict
    found: str
    way_out: str = ""

    def __post_init__(self) -> None:
        if self.verdict is not Verdict.OK and not self.way_out:
            raise ValueError(f"the finding '{self.found}' lacks its way out")


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, way_out: str) -> Finding:
    return Finding(check, Verdict.WARN, found, way_out)


def fail(check: str, found: str, way_out: str) -> Finding:
    return Finding(check, Verdict.FAIL, found, way_out)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be served, as far as the command line says. `gpu_flag`: the flag that asks for GPUs, or None;
    `no_gpus`: the command line rules them out."""

    model: str | None = None
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    gpu_flag: str | None = None
    no_gpus: bool = False
    locks_memory: bool = False
    numa: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said."""

    code: int
    out: str
    err: str


def run(command: list[str]) -> Answer:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(-1, "", f"it gave no answer within {_PATIENCE_S:.0f} s")
    except OSError as error:
        return Answer(-1, "", str(error))
    return Answer(done.returncode, done.stdout, done.stderr)


def load_nvml() -> Any | None:
    """The package nvidia-ml-py, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    module: ModuleType = pynvml
    return module


@dataclass(frozen=True, slots=True)
class Machine:
    """Where checks look; tests put others in place. `root` stands before /proc, /sys and /dev."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    nvml: Any | None = field(default_factory=load_nvml)
    run: Callable[[list[str]], Answer] = run

    def text(self, path: str) -> str | None:
        """A small file below the root, or None."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def python(self, *arguments: str) -> Answer:
        """This Python, in a process of its own: native code may end it."""
        return self.run([sys.executable, *arguments])


def gib(n_bytes: float) -> str:
    return f"{n_bytes / (1 << 30):,.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):,.1f} MiB"
