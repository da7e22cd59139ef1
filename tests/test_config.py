"""Config is the rooms' options side by side: frozen, light to import, and safe to show."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from server.api.options import ApiKey, HttpOptions
from server.config import Config
from server.engine.options import EngineOptions, ModelOptions


@pytest.fixture
def config() -> Config:
    return Config(EngineOptions(ModelOptions("m.gguf")), http=HttpOptions(api_keys=(ApiKey("sesame", "key 1"),)))


def test_nothing_in_it_can_be_changed(config: Config) -> None:
    for room in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, room.name, None)
    for options in (config.http, config.http.cors, config.http.generation, config.chat, config.log):
        name = dataclasses.fields(options)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, name, None)
    for struct in (config.engine, config.engine.model, config.supervisor, config.http.generation.sampling):
        with pytest.raises(AttributeError):
            setattr(struct, struct.__struct_fields__[0], None)


def test_keys_are_not_shown(config: Config) -> None:
    assert "sesame" not in repr(config)


def test_it_imports_nothing_heavy() -> None:
    program = (
        "import sys, server.config\n"
        "heavy = {'fastapi', 'pydantic', 'uvicorn', 'jinja2', 'numpy', 'llama_cpp', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
