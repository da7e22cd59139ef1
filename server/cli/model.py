"""The model that --gguf or --hf-repo names: a path as it is, anything else from this machine or from the hub."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from server.errors import ConfigError
from server.store.names import is_path

if TYPE_CHECKING:
    from server.cli.settings import Settings


def find_model(settings: Settings, asked: str) -> Path:
    """A path that may still be anything (resolve_model checks it). Shows its progress when it has to fetch. Raises
    ConfigError and FetchError."""
    if not settings["hf-repo"] and is_path(asked):
        return Path(asked)
    from server.store.hub import Hub
    from server.store.names import parse_hub_name, parse_name
    from server.store.obtain import Obtainer
    from server.store.places import Places
    from server.store.transfer import TransferOptions

    name = parse_hub_name(asked) if settings["hf-repo"] else parse_name(asked)
    if name is None:
        where = settings.setting("hf-repo").where
        raise ConfigError(f"{where} is '{asked}', but must be OWNER/REPO or OWNER/REPO:QUANT")
    if isinstance(name, Path):
        return name
    if settings["hf-file"]:
        name = replace(name, file=settings["hf-file"], quant=None)
    from server.cli.fetch_display import watcher_for

    with watcher_for(json=False, out=sys.stderr) as watcher:
        obtainer = Obtainer(
            Hub.from_environment(os.environ, token=settings["hf-token"], offline=settings["offline"]),
            Places.from_environment(os.environ, settings["models-dir"]),
            TransferOptions(),
            watcher,
        )
        try:
            return obtainer.find(name)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise
