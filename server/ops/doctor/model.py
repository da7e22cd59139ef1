"""The model's files: whether they are whole, and how fast the disk under them is."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from server.errors import StartError
from server.ops.doctor.finding import Finding, Subject, fail, gib, ok, warn
from server.store.source import resolve_model

_READ_BYTES = 8 << 20
_SAMPLE_BYTES = 2 << 30
_SAMPLE_S = 2.0
_SLOW_LOAD_S = 600.0


def check_model(subject: Subject, *, clock: Callable[[], float] = time.monotonic) -> list[Finding]:
    if subject.model is None:
        return [ok("model", "none given; with --gguf PATH its files and their disk are looked at as well")]
    try:
        files = resolve_model(subject.model)
    except StartError as error:
        cause, _, way_out = error.message.rpartition("; ")
        return [fail("model", cause or error.message, way_out or "give the path of a .gguf file")]
    count = len(files.shards)
    shards = f"{count} files" if count > 1 else "1 file"
    findings = [ok("model", f"{files.name} ({files.header.architecture}): {shards}, {gib(files.n_bytes)}, whole")]
    largest = max(files.shards, key=lambda shard: shard.stat().st_size)
    n_bytes, seconds = read_speed(largest, clock)
    if seconds <= 0 or n_bytes < _READ_BYTES:
        return [*findings, ok("disk", "the model is too small to measure its disk")]
    rate = n_bytes / seconds
    load_s = files.n_bytes / rate
    found = f"{rate / 1e6:,.0f} MB/s from '{largest.parent}': reading the model takes about {_duration(load_s)}"
    if load_s > _SLOW_LOAD_S:
        return [
            *findings,
            warn("disk", found, "put the model on a local NVMe disk; a network share is often the cause"),
        ]
    return [*findings, ok("disk", found)]


def read_speed(path: Path, clock: Callable[[], float]) -> tuple[int, float]:
    """Bytes read and seconds taken, past the page cache where the file system allows that."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        buffer = mmap.mmap(-1, _READ_BYTES)  # aligned to a page, as direct reads need it
        n_bytes, begin = 0, clock()
        while n_bytes < _SAMPLE_BYTES and clock() - begin < _SAMPLE_S:
            try:
                n = os.readv(file, [buffer])
            except OSError:  # the unaligned end of a file, on some file systems
                break
            if not n:
                break
            n_bytes += n
        return n_bytes, clock() - begin
    finally:
        os.close(file)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
