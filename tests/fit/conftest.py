"""Shapes of the GLM models, written once: headers without data."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from server.fit.facts import ModelShape, read_shape
from server.gguf import read_header
from tests.support.shapes import write_shape


class Shapes:
    """`file` is the model's file; `of` its facts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = cache(self._file)
        self.of = cache(self._of)

    def _file(self, model: str) -> Path:
        return write_shape(self._folder, model)

    def _of(self, model: str) -> ModelShape:
        return read_shape([read_header(self.file(model))])


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Shapes:
    return Shapes(tmp_path_factory.mktemp("shapes"))
