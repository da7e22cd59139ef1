"""Small bundles for tests: real layout, invented content."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import server
from server.store.bundle.bag import PAYLOAD, Known, files_below, seal, sums_of
from server.store.bundle.create import TOOLS
from server.store.bundle.description import Description, this_machine
from server.store.bundle.pages import install_script, join_script, readme

SHARDS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


def wheel(
    folder: Path, name: str, files: Mapping[str, str | bytes], version: str = "1.0", tag: str = "py3-none-any"
) -> Path:
    """A wheel that pip installs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    texts: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense-Expression: MIT\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/licenses/LICENSE": "may be used\n",
    }
    record = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in {**texts, f"{info}/RECORD": record}.items():
            archive.writestr(inside, content)
    return path


def fill(payload: Path) -> None:
    """A payload with a file of each class."""
    for number, shard in enumerate(SHARDS, 1):
        place = payload / "model" / shard
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes([number]) * (1000 * number))
    wheel(payload / "wheels", "thing", {"thing.py": "x = 1\n"})
    texts = {
        "wheels/requirements.txt": "thing==1.0\n",
        "config/glmserve.toml": 'alias = "m"\n',
        "licenses/thing-1.0/LICENSE": "may be used\n",
        "sbom.cdx.json": "{}\n",
        "image/server.tar": "image\n",
        "recipe/m.toml": 'name = "m"\n',
    }
    for path, text in texts.items():
        (payload / path).parent.mkdir(parents=True, exist_ok=True)
        (payload / path).write_text(text)


def finish(folder: Path) -> Path:
    """Seal a folder whose data/ is filled."""
    root = Path(server.__file__).parents[1]
    payload = folder / PAYLOAD
    sums = {f"{PAYLOAD}/{path}": sums_of(payload / path) for path in files_below(payload)}
    known = Known({p: s.n_bytes for p, s in sums.items()}, {p: s.blocks for p, s in sums.items()})
    target = this_machine()
    description = Description("m", server.__version__, target, SHARDS, (), None, known)
    description.write(folder)
    for path in TOOLS:
        (folder / "tools" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tools" / path).write_text((root / path).read_text())
    (folder / "install.py").write_text(install_script(target.python))
    (folder / "join.py").write_text(join_script(target.python))
    (folder / "README.md").write_text(readme(description, 1, signed=False))
    seal(folder, sums, {"External-Identifier": "m"})
    return folder


def small_bundle(folder: Path) -> Path:
    fill(folder / PAYLOAD)
    return finish(folder)
