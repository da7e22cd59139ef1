"""The connected side: a bundle is put together in a folder of its own and sealed."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import server
from server.errors import BundleError
from server.store.bundle import inventory, signature, wheels
from server.store.bundle.bag import PAYLOAD, SEAL, Known, OnBytes, Sums, files_below, seal, sums_of, workers
from server.store.bundle.description import Description, Target, this_machine
from server.store.bundle.install import REQUIREMENTS
from server.store.bundle.pages import install_script, join_script, readme
from server.store.bundle.transfer import bytes_to_copy, carry, gib, require_space

# what install.py and join.py need; errors.py and these import the standard library only
TOOLS = (
    "server/__init__.py",
    "server/errors.py",
    "server/store/__init__.py",
    *(f"server/store/bundle/{name}.py" for name in ("__init__", "bag", "description", "install", "pieces", "transfer")),
)
_WHEELS_BYTES = 1 << 30
_MODEL_LICENCE = re.compile(r"(licen[cs]e|notice|readme)[\w.-]*$", re.IGNORECASE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be packed. `settings` is the text of the server's configuration file, without the model's path."""

    name: str
    shards: tuple[Path, ...]
    settings: str
    target: Target = field(default_factory=this_machine)
    target_is_given: bool = False
    recipe: Path | None = None
    model_licence: str | None = None
    cuda: tuple[str, ...] = ()
    llama_wheel: Path | None = None
    image: Path | None = None
    sign_key: Path | None = None
    may_link: bool = True


def source_tree() -> Path:
    """The clone that this server runs from: it has the locks and the sources. Raises BundleError."""
    root = Path(server.__file__).resolve().parents[1]
    if not (root / wheels.RUNTIME_LOCK).is_file() or not (root / "scripts" / "build_llama").is_file():
        raise BundleError(
            "a bundle is made in a clone of glmserve, which has the locked requirements and the build script; this is "
            "an installed package without them: clone the project, run `make install` there, and create it there"
        )
    return root


def parse_target(python: str | None, platform_tag: str | None) -> Target:
    """`python` like "3.12", `platform_tag` like "manylinux_2_28_x86_64". Raises BundleError."""
    here = this_machine()
    version, machine, glibc = here.python, here.machine, here.glibc
    if python is not None:
        match = re.fullmatch(r"3\.(\d+)", python)
        if match is None or int(match[1]) < 11:
            raise BundleError(f"--python is '{python}', but must be 3.11 or newer, for example 3.12")
        version = (3, int(match[1]))
    if platform_tag is not None:
        match = re.fullmatch(r"(?:manylinux_2_(\d+)|manylinux2014|linux)_(x86_64|aarch64)", platform_tag)
        if match is None:
            raise BundleError(
                f"--platform is '{platform_tag}', but must be like manylinux_2_28_x86_64: the far side's glibc (2.28) "
                f"and kind of processor (x86_64 or aarch64)"
            )
        machine = match[2]
        if match[1]:
            glibc = (2, int(match[1]))
        elif platform_tag.startswith("manylinux2014"):
            glibc = (2, 17)
    return Target(version, machine, glibc)


def create(order: Order, to: Path, *, say: Say, on_bytes: OnBytes | None = None) -> Path:
    """Make the bundle in `to`, which must be empty or new. Raises BundleError; what was begun is removed then."""
    root = source_tree()
    to = to.absolute()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BundleError(f"'{to}' is not empty; give --to a folder that is empty or new")
    carried = [*order.shards, *([order.image] if order.image else [])]
    n_bytes = bytes_to_copy(carried, to, may_link=order.may_link)
    require_space(to, n_bytes + _WHEELS_BYTES, "the bundle")
    if n_bytes:
        why = "they lie on another file system" if order.may_link else "as asked"
        say(f"{gib(n_bytes)} will be copied: {why}")
    made = not to.exists()
    to.mkdir(parents=True, exist_ok=True)
    try:
        return _create(root, order, to, say, on_bytes)
    except BaseException:
        for entry in to.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if made:
            to.rmdir()
        raise


def _create(root: Path, order: Order, to: Path, say: Say, on_bytes: OnBytes | None) -> Path:
    payload = to / PAYLOAD
    house = payload / "wheels"
    house.mkdir(parents=True)
    target = _fill_wheelhouse(root, order, house, say)

    ways = {carry(shard, payload / "model" / shard.name, may_link=order.may_link) for shard in order.shards}
    say(f"{len(order.shards)} model files {' and '.join(sorted(way.value for way in ways))}")
    if order.image is not None:
        carry(order.image, payload / "image" / order.image.name, may_link=order.may_link)
    _write(payload / "config" / "glmserve.toml", order.settings)
    if order.recipe is not None:
        _write(payload / "recipe" / order.recipe.name, order.recipe.read_text(encoding="utf-8"))
    _write_licences(root, order, house, payload / "licenses")

    say("reading everything once for its checksums")
    sums = _all_sums(payload, on_bytes)
    _write_sbom(order, payload, house, sums)
    sbom = f"{PAYLOAD}/sbom.cdx.json"
    sums[sbom] = sums_of(to / sbom)

    for path in TOOLS:
        _write(to / "tools" / path, (root / path).read_text(encoding="utf-8"))
    for name, text in (("install.py", install_script(target.python)), ("join.py", join_script(target.python))):
        _write(to / name, text)
    model = tuple(shard.name for shard in order.shards)
    known = Known(
        {path: each.n_bytes for path, each in sums.items()}, {path: each.blocks for path, each in sums.items()}
    )
    image = order.image.name if order.image else None
    description = Description(order.name, server.__version__, target, model, order.cuda, image, known)
    description.write(to)
    n_bytes = sum(each.n_bytes for each in sums.values())
    _write(to / "README.md", readme(description, n_bytes, signed=order.sign_key is not None))
    seal(to, sums, _bag_info(order, target, n_bytes))
    say(f"sealed: {len(sums)} files, {gib(n_bytes)}; the seal is {sums_of(to / SEAL, blocks=False).sha256}")
    if order.sign_key is not None:
        say(f"signed: {signature.sign(to, order.sign_key).name}")
    return to


def _fill_wheelhouse(root: Path, order: Order, house: Path, say: Say) -> Target:
    """Returns the target with the glibc that the wheels really need, where none was asked for."""
    locks = [wheels.RUNTIME_LOCK, wheels.BUILD_LOCK]
    llama = order.llama_wheel or wheels.build_llama_wheel(root, order.target, order.cuda, say)
    if not llama.name.startswith("llama_cpp_python-") or not llama.name.endswith(f"_{order.target.machine}.whl"):
        raise BundleError(
            f"--llama-wheel is '{llama}', but must be a wheel of llama-cpp-python for {order.target.machine}"
        )
    if order.cuda:
        locks.append(wheels.cuda_lock(llama))
    wheels.fetch_wheels(root, house, order.target, locks, say)
    wheels.add_wheel(llama, house)
    wheels.build_server_wheel(root, house)
    wheels.write_requirements(house, REQUIREMENTS)
    needed = wheels.needed_glibc(sorted(house.glob("*.whl")))
    if order.target_is_given and needed > order.target.glibc:
        raise BundleError(
            f"the wheels need glibc {needed[0]}.{needed[1]}, but --platform names "
            f"{order.target.glibc[0]}.{order.target.glibc[1]}; build llama-cpp-python on a system that old "
            f"(GLMSERVE_PORTABLE=on scripts/build_llama) and give its wheel with --llama-wheel"
        )
    return Target(order.target.python, order.target.machine, needed)


def _write_licences(root: Path, order: Order, house: Path, to: Path) -> None:
    inventory.copy_licences(sorted(house.glob("*.whl")), to)
    _write(to / "glmserve" / "LICENSE", (root / "LICENSE").read_text(encoding="utf-8"))
    for file in sorted(order.shards[0].parent.iterdir()):
        if file.is_file() and _MODEL_LICENCE.match(file.name):
            carry(file, to / "model" / file.name, may_link=False)


def _all_sums(payload: Path, on_bytes: OnBytes | None) -> dict[str, Sums]:
    paths = [f"{PAYLOAD}/{path}" for path in files_below(payload)]
    with ThreadPoolExecutor(workers()) as pool:
        return dict(zip(paths, pool.map(lambda path: sums_of(payload.parent / path, on_bytes), paths), strict=True))


def _write_sbom(order: Order, payload: Path, house: Path, sums: dict[str, Sums]) -> None:
    packages = [inventory.read_wheel(wheel) for wheel in sorted(house.glob("*.whl"))]
    model = {shard.name: sums[f"{PAYLOAD}/model/{shard.name}"] for shard in order.shards}
    inventory.write_sbom(
        payload / "sbom.cdx.json", order.name, server.__version__, packages, model, order.model_licence
    )


def _bag_info(order: Order, target: Target, n_bytes: int) -> dict[str, str]:
    return {
        "Bag-Software-Agent": f"glmserve {server.__version__}",
        "Bagging-Date": datetime.now(UTC).date().isoformat(),
        "Bag-Size": gib(n_bytes),
        "External-Identifier": order.name,
        "External-Description": f"glmserve with the model {order.name}, for {target}",
        "Internal-Sender-Description": f"made with Python {sys.version.split()[0]} on {platform.machine()}",
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
