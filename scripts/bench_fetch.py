"""Measures `python -m server fetch` against a fake hub on loopback: its speed beside curl's, in turns, its memory, and
what kill -9 costs.

    python scripts/bench_fetch.py [--size-gib 4] [--turns 3] [--kills 10] [--folder /tmp] [--connections 8]

A file of random bytes is made in the folder. In each turn curl gets it (one connection, no check, into the page cache),
curl gets it and the disk is told to take it (sync -d), and fetch gets it: several connections, SHA-256 and block sums
while it comes, on the disk before it gets its name. With --kills one fetch is killed that many times at random moments,
then left to end; the hub counts every byte that it sent.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.fake_hub import FakeHub  # noqa: E402

REPO, NAME = "bench/Model-GGUF", "m.gguf"
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gib", type=float, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name, FakeHub() as hub:
        folder = Path(name)
        n_bytes = make(folder / "source", int(options.size_gib * 1024))
        hub.add(REPO, {NAME: folder / "source"})
        if options.turns:
            speed(hub, folder, n_bytes, options.turns, options.connections)
        if options.kills:
            kill(hub, folder, n_bytes, options.kills, options.connections)
    return 0


def make(file: Path, n_mib: int) -> int:
    """Noise; each MiB is different from the others."""
    noise = bytearray(os.urandom(MIB))
    with open(file, "wb") as out:
        for number in range(n_mib):
            noise[:8] = number.to_bytes(8, "little")
            out.write(noise)
    return n_mib * MIB


def fetch_command(hub: FakeHub, to: Path, connections: int) -> list[str]:
    command = [sys.executable, "-m", "server", "fetch", REPO, "--to", str(to), "--connections", str(connections)]
    return ["env", f"HF_ENDPOINT={hub.endpoint}", *command]


def speed(hub: FakeHub, folder: Path, n_bytes: int, turns: int, connections: int) -> None:
    url = f"{hub.endpoint}/{REPO}/resolve/main/{NAME}"
    got = folder / "got"
    curl = ["curl", "-sL", "-o", str(got / NAME), url]
    sides = {
        "curl": curl,
        "curl+sync": ["sh", "-c", f'"$@" && sync -d "{got / NAME}"', "sh", *curl],
        "fetch": fetch_command(hub, got, connections),
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    work: dict[str, list[float]] = {side: [] for side in sides}
    memory = 0
    for turn in range(turns):
        for side, command in sides.items():
            shutil.rmtree(got, ignore_errors=True)
            got.mkdir()
            os.sync()
            seconds, usage = clock(command)
            rates[side].append(n_bytes / seconds / 1e6)
            work[side].append((usage.ru_utime + usage.ru_stime) / n_bytes * (1 << 30))
            if side == "fetch":
                memory = max(memory, usage.ru_maxrss)
                assert (got / NAME).stat().st_size == n_bytes
        print(
            f"turn {turn + 1}: " + ", ".join(f"{side} {each[-1]:.0f} MB/s" for side, each in rates.items()), flush=True
        )
    medians = {side: statistics.median(each) for side, each in rates.items()}
    print(f"{n_bytes / (1 << 30):.1f} GiB over {connections} connections; medians: ", end="")
    print(", ".join(f"{side} {rate:.0f} MB/s" for side, rate in medians.items()), end="; ")
    print(
        f"fetch is {medians['fetch'] / medians['curl']:.2f} x curl, "
        f"{medians['fetch'] / medians['curl+sync']:.2f} x curl+sync"
    )
    print("processor seconds for each GiB: ", end="")
    print(", ".join(f"{side} {statistics.median(each):.2f}" for side, each in work.items()))
    print(f"memory of fetch: {memory / 1024:.0f} MB at most")
    shutil.rmtree(got)


def clock(command: list[str]) -> tuple[float, resource.struct_rusage]:
    """Seconds, and what the process used."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return seconds, usage


def kill(hub: FakeHub, folder: Path, n_bytes: int, kills: int, connections: int) -> None:
    to = folder / "killed"
    command = fetch_command(hub, to, connections)[2:]
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}
    before = hub.bytes_sent
    for number in range(kills):
        until = hub.bytes_sent + random.randrange(n_bytes // (kills + 2))
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        while hub.bytes_sent < until and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.2)  # what the kernel still takes is counted too
        print(f"kill {number + 1}: {(hub.bytes_sent - before) / MIB:,.0f} MiB sent so far", flush=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    sent = hub.bytes_sent - before
    same = subprocess.run(["cmp", str(to / NAME), str(folder / "source")], check=False).returncode == 0
    more = (sent - n_bytes) / MIB
    print(
        f"{kills} kills: {sent / MIB:,.0f} MiB sent for a file of {n_bytes / MIB:,.0f} MiB, {more:.1f} MiB more", end=""
    )
    print(f" ({more / kills:.1f} for each kill; allowed 64); the file is {'right' if same else 'WRONG'}")


if __name__ == "__main__":
    raise SystemExit(main())
