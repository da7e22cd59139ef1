from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gguf_bytes import Gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file that passes every check that needs no native code."""
    return Gguf().write(tmp_path / "tiny-Q4_K_M.gguf")
