"""How many threads llama.cpp's CPU backend gets, and how they wait for each other.

Its threads meet at a barrier after every node of the graph, a thousand times a token, and wait by spinning. When the
kernel puts two of them on one core beside any other busy process, each barrier lasts a time slice: 130 tokens/s were
seen to become 2. Bound to cores they cannot meet so; see docs/decisions/0008.
"""

from __future__ import annotations

import os
from pathlib import Path

from server.engine.options import ModelOptions


def n_allowed_cpus() -> int:
    """Logical CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Physical cores, as llama.cpp counts them, but no more than this process may run on."""
    siblings = {file.read_text() for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings")}
    logical = os.cpu_count() or 4
    physical = len(siblings) or (logical if logical <= 4 else logical // 2)
    return max(1, min(physical, n_allowed_cpus()))


def openmp_environment(model: ModelOptions) -> dict[str, str]:
    """Variables for a new engine process; they must be set before it starts.

    Threads are bound only where they take all CPUs that there are: elsewhere the kernel has room to keep them apart,
    and two servers on one machine would be bound to the same cores.
    """
    n_threads = model.n_threads if model.n_threads > 0 else default_threads()
    n_most = max(n_threads, model.n_threads_batch)
    # Spin for some ten microseconds, then sleep: a thread that has to wait for longer is not needed.
    spin = {"GOMP_SPINCOUNT": "10000"}
    return {**spin, "OMP_PROC_BIND": "true"} if n_most >= n_allowed_cpus() else spin
