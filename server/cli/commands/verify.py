"""python -m server verify: whether the files of a model are what they should be, down to the last byte."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from server.cli.flag import Group
from server.cli.subcommand import Call, Place, Spec, models_dir_option, option
from server.cli.values import Switch, Whole
from server.errors import ConfigError

SPEC = Spec(
    "verify",
    "checks the files of a model, down to the last byte",
    places=(Place("PATH", "a file of a model, its folder, one of several, a bundle, or a name"),),
    groups=(
        Group(
            "How",
            (
                option("--quick", Switch(), False, "only what every start checks, without reading the weights"),
                option("--again", Switch(), False, "read files anew that have not changed since they were last read"),
                option(
                    "-j --threads",
                    Whole(least=1, most=64, sample="4"),
                    None,
                    "files to read at a time (default: one for each core)",
                ),
                models_dir_option(),
                option("--json", Switch(), False, "write one JSON document"),
            ),
        ),
    ),
    notes=(
        "Exit code 0: all is right. 1: something is wrong, with a sentence for each fault. 2: a wrong call.",
        "Sums are compared with fetch's record, a bundle's manifest, SHA256SUMS, the hub's notes, recipes.",
    ),
)


def run(call: Call) -> int:
    from server.cli.verify_display import json_text, progress_for, report_text
    from server.store.digest import cache_folder
    from server.store.recipes import load_recipes
    from server.store.verify import VerifyOptions, verify

    began = time.monotonic()
    with progress_for(quiet=call["json"]) as progress:
        options = VerifyOptions(
            quick=call["quick"],
            again=call["again"],
            n_threads=call["threads"] or 0,
            cache=cache_folder(call.environment),
            recipes=load_recipes(),
            progress=progress,
        )
        report = verify(_path(call), options)
    if call["json"]:
        sys.stdout.write(json_text(report))
    else:
        sys.stdout.write(report_text(report, time.monotonic() - began, color=sys.stdout.isatty()))
    sys.stdout.flush()
    return 0 if report.ok else 1


def _path(call: Call) -> Path:
    """A path as it is; a hub name or a recipe's is one of a model on this machine, complete or not."""
    from server.store.local import local_models
    from server.store.names import parse_name
    from server.store.places import Places

    name = parse_name(call["path"])
    if isinstance(name, Path):
        return name.expanduser()
    places = Places.from_environment(call.environment, call["models-dir"])
    first = places.find(name)
    if first is not None:
        return first.parent if first.is_relative_to(places.models) else first
    quant = (name.quant or "").lower()
    parts = [
        model.first.parent
        for model in local_models(places.models, places.hf_cache)
        if model.repo.lower() == name.repo.lower() and quant in ("", model.folder.lower())
    ]
    if len(parts) == 1:
        return parts[0]
    if parts:
        listed = ", ".join(f"'{part}'" for part in parts)
        raise ConfigError(f"'{call['path']}' may be one of {listed}; give the path of it")
    raise ConfigError(
        f"'{call['path']}' is not on this machine, neither in '{places.models}' nor in '{places.hf_cache}'; "
        f"get it: python -m server fetch {call['path']}"
    )
