"""What `verify` shows: a table of the files, a sentence for every fault, and the progress of reading on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from server.cli.tables import plain_table, rich_table, size_text
from server.store.verify import FileReport, FileState, Progress, Report

_STYLES = {
    FileState.OK.value: "green",
    FileState.WHOLE.value: "yellow",
    FileState.BAD.value: "red bold",
    FileState.MISSING.value: "red bold",
}
_SUM_DIGITS = 16


def report_text(report: Report, seconds: float, *, color: bool) -> str:
    """The table, then faults and notes, one line each, then the verdict."""
    rows = [_row(each, report.path) for each in report.files]
    heads: tuple[str, ...] = ("FILE", "SIZE", "STATE", "COMPARED WITH", "SHA-256")
    if all(each.state is not FileState.WHOLE for each in report.files):  # sums are shown where they are all there is
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    lines = [rich_table(heads, rows, _STYLES)] if color else plain_table(heads, rows)
    lines += [f"fault: {fault.sentence}" for fault in report.faults]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(_verdict(report, seconds))
    return "\n".join(lines) + "\n"


def _row(report: FileReport, root: Path) -> tuple[str, ...]:
    inside = root.is_dir() and report.file.is_relative_to(root)
    name = str(report.file.relative_to(root)) if inside else report.file.name
    size = "" if report.size_bytes is None else size_text(report.size_bytes)
    source = report.expected.source if report.expected else ""
    return name, size, report.state.value, source, (report.sha256 or "")[:_SUM_DIGITS]


def _verdict(report: Report, seconds: float) -> str:
    read = sum(each.size_bytes or 0 for each in report.files if each.sha256 and not each.kept)
    kept = sum(each.kept for each in report.files)
    n_files = len(report.files)
    counted = "1 file" if n_files == 1 else f"{n_files} files"
    total = size_text(sum(each.size_bytes or 0 for each in report.files))
    how = f"{size_text(read)} read in {seconds:.1f} s" if read else "no weights read"
    if read and seconds > 0:
        how += f", {size_text(round(read / seconds))}/s"
    if kept:
        how += f"; {kept} unchanged since they were last read (--again reads them anew)"
    n_faults = len(report.faults)
    verdict = "all right" if report.ok else "1 fault" if n_faults == 1 else f"{n_faults} faults"
    return f"{verdict}: {counted}, {total} ({how})"


def json_text(report: Report) -> str:
    files = [
        {
            "file": str(each.file),
            "size_bytes": each.size_bytes,
            "state": each.state.value,
            "sha256": each.sha256,
            "kept": each.kept,
            "expected_sha256": each.expected.sha256 if each.expected else None,
            "expected_size_bytes": each.expected.size_bytes if each.expected else None,
            "compared_with": each.expected.source if each.expected else None,
        }
        for each in report.files
    ]
    faults = [
        {
            "kind": fault.kind.value,
            "file": str(fault.file),
            "byte": fault.byte,
            "end": fault.end,
            "cause": fault.cause,
            "remedy": fault.remedy,
        }
        for fault in report.faults
    ]
    document = {
        "path": str(report.path),
        "ok": report.ok,
        "files": files,
        "faults": faults,
        "notes": list(report.notes),
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


@contextmanager
def progress_for(*, quiet: bool) -> Iterator[Progress]:
    """Bars on a terminal, one line elsewhere; on stderr, so that the report alone is on stdout."""
    if quiet:
        yield Progress()
        return
    if not sys.stderr.isatty():
        yield Progress(begin=_announce)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        total = bars.add_task("all files", visible=False)
        sizes: dict[Path, int] = {}
        tasks: dict[Path, TaskID] = {}

        def begin(files: Sequence[tuple[Path, int]]) -> None:
            sizes.update(files)
            bars.update(total, total=sum(sizes.values()), visible=len(sizes) > 1)

        def advance(file: Path, n_bytes: int) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file.name, total=sizes[file])
            bars.advance(tasks[file], n_bytes)
            bars.advance(total, n_bytes)
            if bars.tasks[tasks[file]].finished:
                bars.update(tasks[file], visible=False)

        yield Progress(begin, advance)


def _announce(files: Sequence[tuple[Path, int]]) -> None:
    if files:
        counted = "1 file" if len(files) == 1 else f"{len(files)} files"
        print(f"reading {counted}, {size_text(sum(size for _, size in files))}", file=sys.stderr, flush=True)
