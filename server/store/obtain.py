"""From a model's name to its files: those that are here, or those that the hub has."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from server.errors import FetchError
from server.store.fetch import Fetch, Watcher, plan_fetch
from server.store.hub import Hub
from server.store.names import HubName
from server.store.places import Places
from server.store.quants import choose
from server.store.transfer import TransferOptions


@dataclass(frozen=True, slots=True)
class Obtainer:
    hub: Hub
    places: Places
    options: TransferOptions
    watcher: Watcher

    def find(self, name: HubName) -> Path:
        """The first file of a model, from this machine or else from the hub. Raises FetchError and ConfigError."""
        here = self.places.find(name)
        return here if here is not None else self.fetch(name)

    def fetch(self, name: HubName, *, to: Path | None = None, repair: bool = False) -> Path:
        """Look at the hub and get what is missing. Raises FetchError and ConfigError."""
        if self.hub.offline:
            raise FetchError(
                f"{name} is not on this machine (neither in '{self.places.models}' nor in '{self.places.hf_cache}'), "
                f"and --offline or HF_HUB_OFFLINE forbids fetching it; where there is a network, run "
                f"'{fetch_command(name, to=Path('DIR'))}', then copy DIR here and give it to --gguf"
            )
        listing = self.hub.list_files(name)
        quant = choose(name, listing.files)
        folder = to if to is not None else self.places.folder(name.repo, quant.name)
        plan = plan_fetch(listing, quant, folder)
        return Fetch(plan, self.hub, self.options, self.watcher, repair).run()


def fetch_command(name: HubName, *, to: Path | None = None) -> str:
    """The command line that gets a model."""
    words = ["python", "-m", "server", "fetch", name.repo if name.file else str(name)]
    if name.file:
        words += ["--file", name.file]
    if name.revision != "main":
        words += ["--revision", name.revision]
    if to is not None:
        words += ["--to", str(to)]
    return shlex.join(words)
