"""Shorthands of the command line's tests: settings and configs from arguments, without a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from server.cli.build import build_config
from server.cli.command import read_settings
from server.cli.settings import Settings
from server.config import Config
from server.errors import ConfigError


def settings_of(*arguments: str, env: Mapping[str, str] | None = None, file: str | None = None) -> Settings:
    """`file` is the path of a TOML file."""
    config = () if file is None else ("--config", file)
    return read_settings([*arguments, *config], env or {})


def config_of(model: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Config:
    return build_config(settings_of("--gguf", str(model), *arguments, env=env))


def refusal(*arguments: str, env: Mapping[str, str] | None = None, file: str | None = None) -> str:
    """The one sentence that these arguments are refused with."""
    with pytest.raises(ConfigError) as caught:
        settings_of(*arguments, env=env, file=file)
    message = caught.value.message
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message
