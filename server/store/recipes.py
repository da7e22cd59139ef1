"""Recipes: what is known about a model before a byte of it is here. One TOML file each in models/: where its files are,
its quants with sizes and shard counts, its context, dialect, sampling defaults and flags for classes of boxes.

No number without a source: every table that holds one has a `source` that says where it was published, or how it was
computed. A number nobody has published is left out, and then it is unknown here too. The hub's own listing, seen when a
model is fetched, is always the better word; sizes here are rounded as published.
"""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from server.errors import ConfigError

# A link to the folder in the source tree, of which an installed package has a copy: one way to find it in both.
RECIPES_FOLDER = Path(__file__).parent / "models"


class BoxClass(StrEnum):
    """GPUs times memory in GB. `1x24+ram` computes experts on the CPU, `cpu` everything."""

    A100_80 = "8x80"
    H200_141 = "8x141"
    PRO_96 = "4x96"
    CONSUMER = "1x24+ram"
    CPU = "cpu"


class Quant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set of files in a hub repository. `pattern` is matched against their paths there (fnmatch; * takes / too)."""

    pattern: str
    n_shards: int | None = None
    size_bytes: int | None = None  # all shards, rounded as published
    source: str | None = None
    repo: str = ""  # empty in a file: the recipe's
    revision: str = ""
    name: str = ""  # the key in the file

    def __post_init__(self) -> None:
        _check_source(self.source, (self.n_shards, self.size_bytes))


class KnownFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of which every byte is known."""

    name: str
    size_bytes: int = msgspec.field(name="bytes")
    sha256: str


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most tokens of one sequence, as trained."""

    n_tokens: int
    source: str


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model's makers advise where a request says nothing."""

    source: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        pairs = (
            ("--temp", self.temperature),
            ("--top-p", self.top_p),
            ("--top-k", self.top_k),
            ("--min-p", self.min_p),
        )
        return tuple(word for name, value in pairs if value is not None for word in (name, f"{value:g}"))


class BoxAdvice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Flags for one class of boxes, with the reckoning behind them in `source`."""

    box: BoxClass
    flags: str  # as typed behind --gguf
    source: str
    quant: str | None = None

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.flags)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`dialect` is the GLM generation that writes its turns, or "plain". The files are in a hub repository (`repo`), in
    a folder beside the recipes (`directory`, source tree only) or in an installed package (`package`)."""

    name: str
    title: str
    architecture: str
    dialect: str
    license: str
    context: Context
    aliases: tuple[str, ...] = ()
    repo: str | None = None
    revision: str = "main"
    default_quant: str | None = None
    directory: str | None = None
    package: str | None = None
    quants: dict[str, Quant] = {}
    shards: tuple[KnownFile, ...] = ()
    sampling: Sampling | None = None
    boxes: tuple[BoxAdvice, ...] = ()

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.repo, self.directory, self.package)) != 1:
            raise ValueError("exactly one of repo, directory and package says where the files are")
        if self.repo is not None and self.default_quant not in self.quants:
            raise ValueError(f"default_quant is {self.default_quant!r}, which is none of its quants")
        for advice in self.boxes:
            if advice.quant is not None and advice.quant not in self.quants:
                raise ValueError(f"the box {advice.box} has the quant {advice.quant!r}, which is none of its quants")

    def find_quant(self, name: str) -> Quant | None:
        """By name, in whatever case; a hub repository may well have more quants than its recipe."""
        wanted = name.lower()
        return next((quant for key, quant in self.quants.items() if key.lower() == wanted), None)

    def advice(self, box: BoxClass) -> BoxAdvice | None:
        return next((advice for advice in self.boxes if advice.box == box), None)


def load_recipes(folder: Path = RECIPES_FOLDER) -> tuple[Recipe, ...]:
    """All recipes: those with a hub repository first, the newest model first. Raises ConfigError for a broken file."""
    recipes = [read_recipe(file) for file in sorted(folder.glob("*.toml"))]
    by_name = sorted(recipes, key=lambda recipe: recipe.name, reverse=True)
    return tuple(sorted(by_name, key=lambda recipe: recipe.repo is None))


def read_recipe(file: Path) -> Recipe:
    """Raises ConfigError when the file cannot be read, is no TOML or departs from the schema."""
    try:
        recipe = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Recipe)
    except OSError as error:
        raise ConfigError(f"the recipe '{file}' cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # ValidationError is a ValueError
        raise ConfigError(f"the recipe '{file}' is not valid: {error}; take it from the release again") from None
    quants = {
        name: msgspec.structs.replace(
            quant, name=name, repo=quant.repo or recipe.repo or "", revision=quant.revision or recipe.revision
        )
        for name, quant in recipe.quants.items()
    }
    return msgspec.structs.replace(recipe, quants=quants)


def find_recipe(name: str, recipes: Sequence[Recipe] | None = None) -> Recipe | None:
    """The recipe of that name or alias, in whatever case. None: there is no such recipe."""
    wanted = name.strip().lower()
    for recipe in load_recipes() if recipes is None else recipes:
        if wanted in (known.lower() for known in (recipe.name, *recipe.aliases)):
            return recipe
    return None


def recipe_named(name: str, recipes: Sequence[Recipe] | None = None) -> Recipe:
    """As find_recipe, but raises ConfigError with the nearest names and all others."""
    known = load_recipes() if recipes is None else recipes
    recipe = find_recipe(name, known)
    if recipe is not None:
        return recipe
    near = near_names(name, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"there is no recipe '{name}'; {hint}there are recipes for {', '.join(recipe.name for recipe in known)}; "
        f"any other model goes by its hub name, OWNER/REPO:QUANT"
    )


def near_names(name: str, recipes: Sequence[Recipe]) -> list[str]:
    """At most two names that a slip of the finger may have meant."""
    names = {known.lower(): recipe.name for recipe in recipes for known in (recipe.name, *recipe.aliases)}
    near = difflib.get_close_matches(name.strip().lower(), names, n=4, cutoff=0.75)
    return list(dict.fromkeys(names[known] for known in near))[:2]


def near_repo(name: str, recipes: Sequence[Recipe]) -> str | None:
    """A repository that we know and that a slip of the finger may have meant."""
    repos = {quant.repo.lower(): quant.repo for recipe in recipes for quant in recipe.quants.values()}
    near = difflib.get_close_matches(name.lower(), repos, n=1, cutoff=0.85)
    return repos[near[0]] if near and near[0] != name.lower() else None


def _check_source(source: str | None, numbers: Sequence[int | None]) -> None:
    if source is None and any(number is not None for number in numbers):
        raise ValueError("a number needs the source that it was taken from")
