from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[ServerProcess]:
    """Four slots with a cache of their own, 1,024 tokens each."""
    with ServerProcess("--gguf", str(tiny_model), "--parallel", "4", "--ctx-size", "4096", "--alias", "tiny") as server:
        yield server
        assert server.stop() == 0, server.output
