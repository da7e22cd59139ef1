"""`python -m server bundle`: pack a model and its server for a machine without a network; check, install, cut, join."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.cli.flag import Group
from server.cli.subcommand import Call, Place, Spec, models_dir_option, option
from server.cli.values import BadValue, Choice, Kind, Switch, Whole, Words
from server.errors import BundleError, ConfigError

if TYPE_CHECKING:
    from server.store.bundle.create import Order
    from server.store.recipes import Recipe

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSize(Kind):
    """A number of bytes. G is 10^9, as on the labels of disks; Gi is 2^30."""

    metavar: str = "SIZE"
    sample: str = "64G"

    @property
    def rule(self) -> str:
        return "a size like 64G, 500M or 60GiB"

    def parse(self, text: str) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
        if match is None or match[2].lower() not in _UNITS:
            raise BadValue(self.rule)
        return int(float(match[1]) * _UNITS[match[2].lower()])


_FILE = Kind(metavar="FILE", sample="FILE")
_FOLDER = Kind(metavar="DIR", sample="DIR")
_TO = option("--to", _FOLDER, None, "folder to write, empty or new")

_CREATE = Spec(
    "create",
    "Pack a model, the server and all it needs. Needs a clone of glmserve and, once, the network.",
    places=(Place("NAME", "a recipe, a hub name OWNER/REPO:QUANT, or the path of a model"),),
    groups=(
        Group(
            "Bundle",
            (
                _TO,
                option("--from", _FOLDER, None, "folder of the model's files (default: where fetch puts them)"),
                models_dir_option(),
                option(
                    "--box",
                    Choice(choices=("8x80", "8x141", "4x96", "1x24+ram", "cpu"), metavar="BOX", sample="8x80"),
                    None,
                    "settings by the recipe's advice for such a box",
                ),
                option("--config", _FILE, None, "settings of the far side (TOML), in place of --box"),
                option("--image", _FILE, None, "container image (docker save) to carry along"),
                option("--sign-key", _FILE, None, "sign the bundle with this EC key (PEM)"),
                option("--copy", Switch(), False, "copy the model even where a hard link would do"),
            ),
        ),
        Group(
            "Far side",
            (
                option("--python", Kind(metavar="X.Y", sample="3.12"), None, "its Python (default: as here)"),
                option(
                    "--platform",
                    Kind(metavar="TAG", sample="manylinux_2_28_x86_64"),
                    None,
                    "its glibc and processor (default: as here)",
                    note="manylinux_2_28_x86_64 means glibc 2.28. The wheels decide what is really needed; the bundle "
                    "says so, and installing checks it.",
                ),
                option(
                    "--cuda",
                    Words(metavar="ARCH,…", sample="80,90"),
                    None,
                    "build for these GPU architectures too (80,89,90,100,120)",
                ),
                option("--llama-wheel", _FILE, None, "a llama-cpp-python wheel, in place of building one"),
            ),
        ),
    ),
    notes=(
        "Where DIR is on the model's file system, its files are hard-linked: do not change them then.",
        "Building llama-cpp-python takes minutes, with CUDA hours; the wheel is kept for the next time.",
    ),
)
_VERIFY = Spec(
    "verify",
    "Compare every byte of a bundle with its checksums. An interrupted check goes on where it was.",
    places=(Place("DIR", "the bundle"),),
    groups=(Group("Flags", (option("--public-key", _FILE, None, "check the signature too (PEM)"),)),),
)
_INSTALL = Spec(
    "install",
    "Check a bundle and install it; no network. Without a glmserve: python3 DIR/install.py --prefix P",
    places=(Place("DIR", "the bundle"),),
    groups=(
        Group(
            "Flags",
            (
                option("--prefix", _FOLDER, None, "folder to install into, empty or new"),
                option("--model-in-place", Switch(), False, "serve the model from the bundle"),
            ),
        ),
    ),
)
_SPLIT = Spec(
    "split",
    "Cut a bundle into pieces for disks that are smaller than it.",
    places=(Place("DIR", "the bundle"),),
    groups=(
        Group(
            "Flags",
            (
                option("--size", ByteSize(), None, "bytes of a piece: 64G as on a disk's label, 60GiB"),
                option("--to", _FOLDER, None, "folder to write the pieces to"),
                option("--piece", Whole(least=1, sample="1"), None, "write this piece only, for one disk at a time"),
            ),
        ),
    ),
)
_JOIN = Spec(
    "join",
    "Put pieces together, as disks arrive. Without a glmserve: python3 PIECE/join.py --to DIR PIECE…",
    places=(Place("PIECE", "folders of pieces, or folders that hold some", many=True),),
    groups=(Group("Flags", (option("--to", _FOLDER, None, "folder that becomes the bundle"),)),),
)

SPEC = Spec("bundle", "pack a model for a machine without a network", verbs=(_CREATE, _VERIFY, _INSTALL, _SPLIT, _JOIN))


def run(call: Call) -> int:
    match call.verb:
        case "create":
            return _create(call)
        case "verify":
            return _verify(call)
        case "install":
            return _install(call)
        case "split":
            return _split(call)
        case _:
            return _join(call)


def _create(call: Call) -> int:
    from server.store.bundle.create import create
    from server.store.bundle.install import Progress

    to = _required(call, "to", "create")
    order = _order(call)
    progress = Progress(sys.stderr.isatty())
    folder = create(order, to, say=_say, on_bytes=progress)
    progress.end()
    _say(f"the bundle is {folder}; carry it over whole, and there: python3 install.py --prefix FOLDER")
    return 0


def _verify(call: Call) -> int:
    from server.store.bundle.install import Progress, report, verify

    folder = Path(call["dir"])
    progress = Progress(sys.stderr.isatty())
    checked = verify(folder, progress)
    progress.end()
    for line in report(folder, checked):
        _say(line)
    if not checked.faults and call["public-key"]:
        from server.store.bundle.signature import check

        check(folder, Path(call["public-key"]))
        _say("the signature holds")
    return BundleError.exit_code if checked.faults else 0


def _install(call: Call) -> int:
    from server.store.bundle.install import Progress, install

    prefix = _required(call, "prefix", "install")
    progress = Progress(sys.stderr.isatty())
    in_place = call["model-in-place"]
    installed = install(Path(call["dir"]), prefix, say=_say, on_bytes=progress, model_in_place=in_place)
    _say(f"installed. Start it with\n\n    {installed.command}\n\nor {installed.prefix / 'start'}")
    return 0


def _split(call: Call) -> int:
    from server.store.bundle.pieces import split

    to = _required(call, "to", "split")
    if call["size"] is None:
        raise ConfigError("bundle split needs --size, the bytes of a piece; for example --size 64G")
    split(Path(call["dir"]), to, call["size"], say=_say, only=call["piece"])
    return 0


def _join(call: Call) -> int:
    from server.store.bundle.pieces import join, report

    to = _required(call, "to", "join")
    joined = join([Path(place) for place in call["piece"]], to, say=_say)
    for line in report(joined, to):
        _say(line)
    return BundleError.exit_code if joined.missing else 0


def _required(call: Call, key: str, verb: str) -> Path:
    if call[key] is None:
        raise ConfigError(f"bundle {verb} needs --{key}; for example --{key} /srv/bundles/glm")
    return Path(call[key]).expanduser()


def _say(line: str) -> None:
    print(line, flush=True)


# ── what create packs ────────────────────────────────────────────────────────────────────────────────────────────────


def _order(call: Call) -> Order:
    from server.store.bundle.create import Order, parse_target
    from server.store.recipes import RECIPES_FOLDER, find_recipe
    from server.store.source import resolve_model

    asked = call["name"]
    recipe = None if os.path.exists(asked) else find_recipe(asked.partition(":")[0])
    files = resolve_model(_place_of(call))
    name = recipe.name if recipe else files.name
    return Order(
        name=name,
        shards=files.shards,
        settings=_settings_text(call, name, recipe),
        target=parse_target(call["python"], call["platform"]),
        target_is_given=call["platform"] is not None and "manylinux" in call["platform"],
        recipe=RECIPES_FOLDER / f"{recipe.name}.toml" if recipe else None,
        model_licence=recipe.license if recipe else None,
        cuda=call["cuda"] or (),
        llama_wheel=_file(call, "llama-wheel"),
        image=_file(call, "image"),
        sign_key=_file(call, "sign-key"),
        may_link=not call["copy"],
    )


def _place_of(call: Call) -> Path:
    """Where the model's files are. Nothing is fetched here: that deserves a command of its own."""
    from server.store.names import parse_name
    from server.store.obtain import fetch_command
    from server.store.places import Places

    if call["from"] is not None:
        return Path(call["from"]).expanduser()
    name = parse_name(call["name"])
    if isinstance(name, Path):
        return name
    here = Places.from_environment(call.environment, call["models-dir"]).find(name)
    if here is None:
        raise ConfigError(
            f"{name} is not on this machine, and a bundle is packed of files that are: run '{fetch_command(name)}' "
            f"first, or name their folder with --from"
        )
    return here


def _file(call: Call, key: str) -> Path | None:
    if call[key] is None:
        return None
    path = Path(call[key]).expanduser()
    if not path.is_file():
        raise ConfigError(f"--{key} is '{path}', but there is no such file; check the path")
    return path


def _settings_text(call: Call, name: str, recipe: Recipe | None) -> str:
    """The far side's configuration file, without the model's path. Raises ConfigError when it would not be accepted."""
    from server.cli.command import read_settings
    from server.cli.given import Rank
    from server.cli.help import toml

    config = _file(call, "config")
    if config is not None:
        settings = read_settings(["--config", str(config)], {})
        if settings.given("gguf"):
            raise ConfigError(f"--config names '{config}', which sets gguf; leave it out, installing sets it")
        return config.read_text(encoding="utf-8")
    from server.store.recipes import BoxClass

    arguments = ["--alias", name]
    advice = recipe.advice(BoxClass(call["box"])) if recipe and call["box"] else None
    if call["box"] and advice is None:
        raise ConfigError(f"--box is {call['box']}, but there is no advice for '{name}' on it; give --config instead")
    if advice is not None:
        arguments += advice.arguments
    if recipe and recipe.sampling:
        arguments += recipe.sampling.flags
    settings = read_settings(arguments, {})
    lines = [f"# The server's settings: long flag names without dashes. Of the recipe {name}." if recipe else "#"]
    for setting in settings:
        if setting.rank is not Rank.DEFAULT and not setting.flag.action:
            plain: Any = setting.flag.kind.plain(setting.value)
            lines.append(f"{setting.flag.key} = {toml(list(plain) if isinstance(plain, tuple) else plain)}")
    return "\n".join(lines) + "\n"
