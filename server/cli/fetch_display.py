"""How a fetch is shown: bars on a terminal, a line now and then elsewhere, or JSON lines for programs."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from server.store.fetch import FileProgress, Plan, Stage
from server.store.quants import size_text

_RATE_OVER_S = 10.0
_LINE_EVERY_S = 10.0
_JSON_EVERY_S = 1.0
_BAR_EVERY_S = 0.2


class Meter:
    """Bytes per second over the last seconds, and how long the rest takes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, n_bytes: int) -> None:
        self._seen.append((now_s, n_bytes))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= _RATE_OVER_S:
            self._seen.popleft()

    @property
    def bytes_per_s(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (began_s, before), (now_s, now) = self._seen[0], self._seen[-1]
        return (now - before) / (now_s - began_s) if now_s > began_s else 0.0

    def left_s(self, n_missing: int) -> float | None:
        """None: nobody can say."""
        rate = self.bytes_per_s
        return n_missing / rate if rate > 0 else None


class _Clock:
    """When something is to be shown, and which files were finished since."""

    def __init__(self, every_s: float) -> None:
        self.meter = Meter()
        self._every_s = every_s
        self._last_s = time.monotonic()
        self._n_done = 0
        self.meter.note(self._last_s, 0)

    def is_due(self, files: Sequence[FileProgress]) -> bool:
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s:
            return False
        self._last_s = now_s
        self.meter.note(now_s, sum(each.n_received for each in files))
        return True

    def finished(self, files: Sequence[FileProgress]) -> list[FileProgress]:
        done = [each for each in files if each.stage is Stage.DONE]
        new, self._n_done = done[self._n_done :], len(done)
        return new


class LineWatcher:
    """For logs: a line for every file, and one now and then in between."""

    def __init__(self, out: TextIO, every_s: float = _LINE_EVERY_S) -> None:
        self._out = out
        self._clock = _Clock(every_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.flush()

    def begin(self, plan: Plan) -> None:
        self._write(plan_text(plan))

    def tick(self, files: Sequence[FileProgress]) -> None:
        for done in self._clock.finished(files):
            self._write(f"{done.file.name}: complete ({number_of(done, files)})")
        if self._clock.is_due(files):
            self._write(progress_text(files, self._clock.meter))

    def say(self, text: str) -> None:
        self._write(text)

    def done(self, first: Path) -> None:
        self._write(done_text(first))

    def _write(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class JsonWatcher:
    """For programs: one object a line, each with "event"."""

    def __init__(self, out: TextIO, every_s: float = _JSON_EVERY_S) -> None:
        self._out = out
        self._clock = _Clock(every_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.flush()

    def begin(self, plan: Plan) -> None:
        self.write(
            "begin",
            repo=plan.listing.repo,
            revision=plan.listing.commit,
            quant=plan.quant.name,
            folder=str(plan.folder),
            files=[{"name": file.name, "bytes": file.size, "sha256": file.sha256} for file in plan.quant.files],
            bytes=plan.quant.n_bytes,
            missing_bytes=plan.n_missing,
            free_bytes=plan.free_bytes,
        )

    def tick(self, files: Sequence[FileProgress]) -> None:
        for done in self._clock.finished(files):
            self.write("file", name=done.file.name, bytes=done.file.size, received_bytes=done.n_received)
        if self._clock.is_due(files):
            n_there, n_bytes = totals(files)
            left_s = self._clock.meter.left_s(n_bytes - n_there)
            now = current(files)
            self.write(
                "progress",
                file=now.file.name if now else None,
                stage=now.stage.name.lower() if now and now.stage else None,
                there_bytes=n_there,
                bytes=n_bytes,
                received_bytes=sum(each.n_received for each in files),
                bytes_per_s=round(self._clock.meter.bytes_per_s),
                left_s=None if left_s is None else round(left_s),
            )

    def say(self, text: str) -> None:
        self.write("note", text=text)

    def done(self, first: Path) -> None:
        self.write("done", path=str(first))

    def write(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}, ensure_ascii=False), file=self._out, flush=True)


class BarWatcher:
    """For people: a bar for all files together and one for the file that comes."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._clock = _Clock(_BAR_EVERY_S)
        self._console = Console(file=out, highlight=False, markup=False)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[said]}", markup=False),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        self._one = self._bars.add_task("", said="", visible=False)
        self._all = self._bars.add_task("total", said="", visible=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, plan: Plan) -> None:
        self.say(plan_text(plan))

    def tick(self, files: Sequence[FileProgress]) -> None:
        for done in self._clock.finished(files):
            self.say(f"{done.file.name}: complete ({number_of(done, files)})")
        if not self._clock.is_due(files):
            return
        n_there, n_bytes = totals(files)
        now = current(files)
        if now is not None:
            at = now.n_checked if now.stage is Stage.CHECKING else now.n_there
            said = f"{_WORDS[now.stage]} {size_text(at)} of {size_text(now.file.size)}" if now.stage else ""
            self._bars.update(
                self._one, description=now.file.name, total=now.file.size, completed=at, said=said, visible=True
            )
        self._bars.update(
            self._all, total=n_bytes, completed=n_there, said=rate_text(files, self._clock.meter), visible=True
        )
        self._bars.refresh()

    def say(self, text: str) -> None:
        self._console.print(text)

    def done(self, first: Path) -> None:
        self._console.print(done_text(first))


FetchWatcher = LineWatcher | JsonWatcher | BarWatcher

_WORDS = {Stage.WAITING: "waits at", Stage.CHECKING: "checked", Stage.GETTING: "got", Stage.DONE: "complete,"}


def watcher_for(*, json: bool, out: TextIO | None = None) -> FetchWatcher:
    """`out`: standard output if None."""
    stream = sys.stdout if out is None else out
    if json:
        return JsonWatcher(stream)
    return BarWatcher(stream) if stream.isatty() else LineWatcher(stream)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def totals(files: Sequence[FileProgress]) -> tuple[int, int]:
    """Bytes that are there, and bytes of all files."""
    return sum(each.n_there for each in files), sum(each.file.size for each in files)


def current(files: Sequence[FileProgress]) -> FileProgress | None:
    return next((each for each in files if each.stage not in (None, Stage.DONE)), None)


def number_of(one: FileProgress, files: Sequence[FileProgress]) -> str:
    return f"{files.index(one) + 1} of {len(files)}"


def plan_text(plan: Plan) -> str:
    n, missing = len(plan.quant.files), plan.n_missing
    what = f"{plan.listing.repo}:{plan.quant.name}, {n} file{'s' if n > 1 else ''}, {size_text(plan.quant.n_bytes)}"
    rest = "all there" if not missing else f"{size_text(missing)} to get" if plan.n_there else "nothing there yet"
    return f"{what} ({rest}), revision {plan.listing.commit[:12]}, into {plan.folder}"


def progress_text(files: Sequence[FileProgress], meter: Meter) -> str:
    now = current(files)
    if now is not None and now.stage is Stage.CHECKING:
        return f"{now.file.name}: checked {size_text(now.n_checked)} of {size_text(now.file.size)}"
    return f"{now.file.name} ({number_of(now, files)}): {rate_text(files, meter)}" if now else rate_text(files, meter)


def rate_text(files: Sequence[FileProgress], meter: Meter) -> str:
    n_there, n_bytes = totals(files)
    left_s = meter.left_s(n_bytes - n_there)
    left = f", {time_text(left_s)} left" if left_s is not None else ""
    part = 100 * n_there / max(1, n_bytes)
    return f"{size_text(n_there)} of {size_text(n_bytes)} ({part:.1f} %), {size_text(meter.bytes_per_s)}/s{left}"


def time_text(seconds: float) -> str:
    """47 s; 12 min 5 s; 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def done_text(first: Path) -> str:
    model = first.parent if "-of-" in first.name else first
    return f"complete and checked; start it with: python -m server --gguf {shlex.quote(str(model))}"
