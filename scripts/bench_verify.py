"""Compares the speed of `python -m server verify` with sha256sum on the same files, in turns.

    python scripts/bench_verify.py [--size-mib 2048] [--files 4] [--turns 5] [--folder /tmp]

Writes model files of random bytes, reads them once so that all sides find them in memory, then lets sha256sum (as many
at a time as there are cores, by xargs -P), openssl where it is installed, and verify take turns. Prints each turn and
the ratio of the medians. Some builds of sha256sum do not use the processor's instructions for SHA; openssl does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK_BYTES = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        files = [write_model(folder / f"m{n}.gguf", options.size_mib // options.files) for n in range(options.files)]
        n_cores = len(os.sched_getaffinity(0))
        by_xargs = ["xargs", "-0", "-P", str(n_cores), "-n", "1"]
        sides = {"sha256sum": [*by_xargs, "sha256sum", "-b"]}
        if shutil.which("openssl"):
            sides["openssl"] = [*by_xargs, "openssl", "dgst", "-sha256"]
        sides["verify"] = [sys.executable, "-m", "server", "verify", "--again", str(folder)]
        listed = b"\0".join(os.fsencode(file) for file in files)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        clock(sides["sha256sum"], listed)
        for turn in range(options.turns):
            for side, command in sides.items():
                seconds[side].append(clock(command, listed))
            print(f"turn {turn + 1}: " + ", ".join(f"{side} {times[-1]:.2f} s" for side, times in seconds.items()))
    print(f"{options.size_mib} MiB in {options.files} files, {n_cores} at a time; speed of verify:")
    for side in list(sides)[:-1]:
        ratios = [theirs / ours for theirs, ours in zip(seconds[side], seconds["verify"], strict=True)]
        median = statistics.median(seconds[side]) / statistics.median(seconds["verify"])
        print(f"  {median:.2f} x {side} (turns {min(ratios):.2f} to {max(ratios):.2f})")
    return 0


def write_model(file: Path, size_mib: int) -> Path:
    """A GGUF with one tensor of bytes that take that much room."""
    name, architecture = b"weights", b"llama"
    n_bytes = size_mib * BLOCK_BYTES
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, len(architecture)) + architecture
    head += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, n_bytes, 24, 0)
    with open(file, "wb") as out:
        out.write(head + bytes(-len(head) % 32))
        out.writelines(os.urandom(BLOCK_BYTES) for _ in range(size_mib))
    return file


def clock(command: list[str], text: bytes) -> float:
    began = time.perf_counter()
    subprocess.run(command, input=text, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
