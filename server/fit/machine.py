"""This machine's memory and the storage a model lies on. Reads /proc and /sys; everything else in this room is pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from server.fit.choice import Device

_KIB = 1 << 10


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Device:
    """What programs may still take: MemAvailable counts the page cache as free; a container's limit counts too."""
    total, available = _meminfo(proc / "meminfo")
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(cgroups / limit_file), _number(cgroups / used_file)
        if limit is not None and used is not None and limit < total:
            total = limit
            available = min(available, max(0, limit - used + _reclaimable(cgroups / limit_file)))
    return Device("host", total, available, kind="cpu", is_cuda=False)


def _meminfo(path: Path) -> tuple[int, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        n_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return n_bytes, n_bytes
    values = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in lines) if rest}
    total = values.get("MemTotal", 0)
    return total, values.get("MemAvailable", total)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _reclaimable(limit_file: Path) -> int:
    """A group's page cache is counted as used."""
    try:
        pairs = [line.split() for line in (limit_file.parent / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    return values.get("inactive_file", 0) + values.get("active_file", 0)


def choose_load_mode(paths: Sequence[str], *, on_gpus: int, on_host: int, available: int) -> tuple[str, str]:
    """How to read a model of which `on_gpus` and `on_host` bytes stay where, with `available` bytes of host memory; and
    the reason. Where the CPU computes, the file is mapped: nothing is copied, and a second start is warm. Where GPUs
    do, a plain read is twice as fast as page faults; past the page cache when that would only push all else out."""
    if on_host >= on_gpus:
        return "mmap", "the CPU computes most of it"
    if on_gpus + on_host > available * 4 // 5 and all(_reads_directly(path) for path in paths):
        return "dio", "the file is larger than the free memory, so the page cache would not help"
    return "none", "the weights go to GPUs"


def _reads_directly(path: str) -> bool:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    try:
        os.close(os.open(path, os.O_RDONLY | flag))
    except OSError:
        return False
    return True
