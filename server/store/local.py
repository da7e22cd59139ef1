"""Which models are on this machine: in the models folder, which `fetch` fills (OWNER--REPO/QUANT/…), and in the cache
of Hugging Face's own client (models--OWNER--REPO/snapshots/COMMIT/…). Names and counts are looked at, no file is read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.store.recipes import Quant, Recipe
from server.store.shards import is_model_file, model_name, siblings, unfinished_files


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`folder` is the one below the repository's: in the models folder it is named after the quant, in the cache as at
    the hub. `n_bytes` counts the shards that are here complete."""

    repo: str
    folder: str
    first: Path
    n_shards: int
    n_here: int
    n_bytes: int

    @property
    def whole(self) -> bool:
        return self.n_here == self.n_shards

    @property
    def name(self) -> str:
        return model_name(self.first)


def local_models(models_folder: Path, hub_cache: Path) -> tuple[LocalModel, ...]:
    """The models folder first. What cannot be read is not there."""
    return (*_in_models_folder(models_folder), *_in_hub_cache(hub_cache))


def find_local(local: Sequence[LocalModel], quant: Quant) -> LocalModel | None:
    """The model of a recipe's quant, a whole one rather than a part of one."""
    found = [model for model in local if _is_of(model, quant)]
    return max(found, key=lambda model: model.whole, default=None)


def without_recipe(local: Sequence[LocalModel], recipes: Sequence[Recipe]) -> list[LocalModel]:
    quants = [quant for recipe in recipes for quant in recipe.quants.values()]
    return [model for model in local if not any(_is_of(model, quant) for quant in quants)]


def _is_of(model: LocalModel, quant: Quant) -> bool:
    """By the pattern that chooses the files at the hub, or by the folder that fetch gave them."""
    if model.repo.lower() != quant.repo.lower():
        return False
    if model.folder.lower() == quant.name.lower():
        return True
    path = f"{model.folder}/{model.first.name}" if model.folder else model.first.name
    return fnmatch.fnmatchcase(path, quant.pattern)


def _in_models_folder(folder: Path) -> Iterator[LocalModel]:
    for repo in _folders(folder):
        owner, dashes, name = repo.name.partition("--")
        if dashes:
            for quant in _folders(repo):
                yield from _models(quant, f"{owner}/{name}", quant.name)


def _in_hub_cache(folder: Path) -> Iterator[LocalModel]:
    for repo in _folders(folder):
        if not repo.name.startswith("models--") or repo.name.count("--") < 2:
            continue
        owner, name = repo.name.removeprefix("models--").split("--", 1)
        for snapshot in _folders(repo / "snapshots"):
            yield from _models(snapshot, f"{owner}/{name}", "")
            for below in _folders(snapshot):
                yield from _models(below, f"{owner}/{name}", below.name)


def _models(folder: Path, repo: str, named: str) -> Iterator[LocalModel]:
    sets = dict.fromkeys(siblings(file) for file in _entries(folder) if is_model_file(file))
    sets |= dict.fromkeys(siblings(part) for part in _parts(folder))
    for shards in sets:
        here = [shard for shard in shards if shard.is_file() and not unfinished_files(shard)]
        n_bytes = sum(file.stat().st_size for file in here)
        yield LocalModel(repo, named, shards[0], len(shards), len(here), n_bytes)


def _parts(folder: Path) -> Iterator[Path]:
    """The names that unfinished downloads will have."""
    for entry in _entries(folder):
        name, dot, _ = entry.name.rpartition(".")
        if dot and name.lower().endswith(".gguf") and entry in unfinished_files(folder / name):
            yield folder / name


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
