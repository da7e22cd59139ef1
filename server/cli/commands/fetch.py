"""python -m server fetch: gets a model from the hub into a folder, and goes on with it after an interruption."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from server.cli.flag import Group
from server.cli.subcommand import Call, Place, Spec, models_dir_option, option
from server.cli.values import BadValue, Kind, Switch, Whole
from server.errors import ConfigError, StartError

if TYPE_CHECKING:
    from server.cli.fetch_display import FetchWatcher
    from server.store.names import HubName

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGkmg]?)(?:i?[Bb])?(?:/s)?")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate(Kind):
    """Bytes per second, with K, M or G for powers of 1024."""

    metavar: str = "RATE"
    sample: str = "50M"

    @property
    def rule(self) -> str:
        return "bytes per second, with K, M or G for powers of 1024"

    def parse(self, text: str) -> float:
        match = _RATE.fullmatch(text.strip())
        rate = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
        if rate < 1:
            raise BadValue(self.rule)
        return rate


_DIR = Kind(metavar="DIR", sample="/models/glm-5.2")

SPEC = Spec(
    "fetch",
    "gets a model from the hub, or goes on with one that was interrupted",
    places=(Place("NAME", "OWNER/REPO[:QUANT] at the hub, or a recipe such as glm-5.2"),),
    groups=(
        Group(
            "What and where",
            (
                option("-q --quant", Kind(metavar="QUANT", sample="UD-Q4_K_M"), None, "the quant, as behind the colon"),
                option(
                    "--file", Kind(metavar="PATH", sample="m.gguf"), None, "a file of the repository, with its shards"
                ),
                option("--revision", Kind(metavar="REV", sample="main"), None, "branch, tag or commit (default: main)"),
                option("--to", _DIR, None, "folder for the files (default: one below --models-dir)"),
                models_dir_option(),
                option("--repair", Switch(), False, "read what is here through, get again what is wrong in it"),
            ),
        ),
        Group(
            "How",
            (
                option("--connections", Whole(least=1, most=64, sample="8"), 8, "connections at a time"),
                option("--limit-rate", Rate(), None, "bytes per second, as 50M (default: no limit)"),
                option(
                    "--give-up", Whole(least=1, metavar="S", sample="900"), 900, "seconds without a byte that end it"
                ),
                option(
                    "-hft --hf-token",
                    Kind(metavar="TOKEN", sample="hf_…"),
                    None,
                    "token for gated models",
                    env="HF_TOKEN",
                    secret=True,
                ),
                option("--offline", Switch(), False, "ask nobody: only say whether the model is here"),
                option("--json", Switch(), False, "write JSON lines"),
            ),
        ),
    ),
    notes=(
        "The same command goes on where it was stopped, also after a crash or on another day.",
        "HF_ENDPOINT names a mirror; HTTPS_PROXY and SSL_CERT_FILE count; HF_HUB_OFFLINE forbids it all.",
    ),
)


def run(call: Call) -> int:
    from server.cli.fetch_display import JsonWatcher, watcher_for

    watcher = watcher_for(json=call["json"])
    try:
        name = _hub_name(call)
        with watcher, _termination_as_interrupt():
            first = _fetch(call, name, watcher)
    except KeyboardInterrupt:
        print(f"\nstopped; to go on from here: {_again(call)}", file=sys.stderr)
        return 130
    except StartError as error:
        if isinstance(watcher, JsonWatcher):
            watcher.write("error", code=error.code, message=error.message)
        raise
    watcher.done(first)
    return 0


def _fetch(call: Call, name: HubName, watcher: FetchWatcher) -> Path:
    from server.store.hub import Hub
    from server.store.obtain import Obtainer
    from server.store.places import Places
    from server.store.transfer import TransferOptions

    places = Places.from_environment(call.environment, call["models-dir"])
    hub = Hub.from_environment(call.environment, token=call["hf-token"], offline=call["offline"])
    options = TransferOptions(
        connections=call["connections"], bytes_per_s=call["limit-rate"], give_up_s=float(call["give-up"])
    )
    obtainer = Obtainer(hub, places, options, watcher)
    to = Path(call["to"]).expanduser() if call["to"] else None
    here = places.find(name) if to is None and not call["repair"] else None
    if here is not None and (hub.offline or here.is_relative_to(places.hf_cache)):
        return here
    return obtainer.fetch(name, to=to, repair=call["repair"])


def _hub_name(call: Call) -> HubName:
    from server.store.names import parse_name

    name = parse_name(call["name"])
    if isinstance(name, Path) and not name.exists():
        raise ConfigError(
            f"there is no '{name}' here, and a path is nothing to fetch; NAME is OWNER/REPO[:QUANT] or a recipe"
        )
    if isinstance(name, Path):
        raise ConfigError(f"'{call['name']}' is on this machine already: '{name}'; give it to --gguf")
    if call["quant"]:
        plain = call["name"].removesuffix(f":{name.quant}")
        if plain != call["name"] and name.quant != call["quant"]:
            raise ConfigError(f"{call['name']} and --quant {call['quant']} name different quants; keep one of them")
        named = parse_name(f"{plain}:{call['quant']}")
        assert not isinstance(named, Path)
        name = named
    if call["file"]:
        name = replace(name, file=call["file"], quant=None, pattern=None)
    return replace(name, revision=call["revision"]) if call["revision"] else name


def _again(call: Call) -> str:
    words = ["python", "-m", "server", "fetch", call["name"]]
    for key in ("quant", "file", "revision", "to", "models-dir"):
        if call[key] and str(call[key]) != call.environment.get("GLMSERVE_MODELS_DIR"):
            words += [f"--{key}", str(call[key])]
    return shlex.join(words)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a fetch as Ctrl-C does."""
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
