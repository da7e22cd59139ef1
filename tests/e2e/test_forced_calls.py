"""A model of random weights is made to call tools; `python -m tests.forced_calls` does it a thousand times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forced_calls import FLAGS, ask_all
from tests.support.random_glm import write_random_glm
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e


async def test_every_forced_call_fits_its_schema(tmp_path: Path) -> None:
    with ServerProcess("--gguf", str(write_random_glm(tmp_path / "random-glm.gguf")), *FLAGS) as server:
        tally = await ask_all(server.url, range(5000, 5016))
        assert server.stop() == 0, server.output
    assert tally.faults == []
    assert tally.n_valid == 16
