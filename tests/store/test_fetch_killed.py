"""kill -9 in the middle of a fetch, ten times: what came before stays, and the file is right in the end."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub, Slow
from tests.support.fetch_program import CLAIM_BYTES, CONNECTIONS, PIECE_BYTES

SIZE = 3 << 20
KILLS = 10


def start(hub: FakeHub, folder: Path, content: bytes) -> subprocess.Popen[str]:
    digest = hashlib.sha256(content).hexdigest()
    arguments = [hub.endpoint, str(folder), str(len(content)), digest, hub.repos["a/b"].head]
    command = [sys.executable, "-m", "tests.support.fetch_program", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def kill_when_sent(hub: FakeHub, process: subprocess.Popen[str], n_bytes: int) -> None:
    """The hub's own count of bytes decides, so that the moment is the same on a fast and on a slow machine."""
    while hub.bytes_sent < n_bytes and process.poll() is None:
        hub.closing.wait(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


@pytest.mark.parametrize("seed", [1])
def test_ten_kills_cost_no_more_than_the_claims_are_apart(tmp_path: Path, seed: int) -> None:
    content = random.Random(seed).randbytes(SIZE)
    moments: Sequence[int] = [random.Random(seed + i).randrange(20_000, SIZE // 6) for i in range(KILLS)]
    with FakeHub() as hub:
        hub.add("a/b", {"m.gguf": content})
        hub.fault(Slow(2 << 20), times=None)
        for n_more in moments:
            process = start(hub, tmp_path, content)
            kill_when_sent(hub, process, hub.bytes_sent + n_more)
            assert process.stdout is not None
            process.stdout.close()
            assert not (tmp_path / "m.gguf").exists()
        hub.clear_faults()
        process = start(hub, tmp_path, content)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert said == ""
        assert (tmp_path / "m.gguf").read_bytes() == content
        lost = hub.total_sent() - SIZE
        # what no claim told yet, and what was under way on every connection
        assert lost <= KILLS * (CLAIM_BYTES + CONNECTIONS * PIECE_BYTES)
        assert sum(moments) > 2 * KILLS * (CLAIM_BYTES + CONNECTIONS * PIECE_BYTES)  # without claims it would be more
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hash")]
