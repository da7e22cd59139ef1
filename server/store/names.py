"""What a model's name can be: a path, a name at the hub, or the name of a recipe. Only texts are looked at, and
whether a path exists."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from server.errors import ConfigError
from server.store.recipes import find_recipe, load_recipes, near_names

_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:\.git)?(?::(?P<quant>[\w.+-]+))?")
_HUB_PAGE = re.compile(r"/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([^/]+)(?:/(.*))?)?/?")
_HUB_PREFIXES = ("hf://", "hf.co/", "huggingface.co/")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model at the hub. `quant`: its name, or None: the only one there is. `file`: one path in the repository, which
    stands for itself and the shards that belong to it. `pattern`: what the paths of a recipe's quant match. `revision`:
    a branch, tag or commit."""

    repo: str
    quant: str | None = None
    file: str | None = None
    pattern: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else f"{self.repo}/{self.file}" if self.file else self.repo


def parse_name(text: str) -> Path | HubName:
    """What exists on disk is a path, and so is what can be nothing else. Raises ConfigError for a name that is neither
    a path, nor a recipe, nor OWNER/REPO[:QUANT]."""
    if is_path(text):
        return Path(text)
    name = text.strip()
    recipe_name, _, quant = name.partition(":")
    recipe = find_recipe(recipe_name)
    if recipe is not None and recipe_name.lower() != (recipe.repo or "").lower():
        return _of_recipe(recipe_name, quant or None)
    hub = parse_hub_name(name)
    if hub is not None:
        return hub
    near = near_names(recipe_name, load_recipes())
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"'{text}' is neither a file or folder here, nor a recipe, nor a hub name; {hint}give a path, a recipe "
        f"(python -m server models lists them) or OWNER/REPO:QUANT"
    )


def parse_hub_name(text: str) -> HubName | None:
    """OWNER/REPO, OWNER/REPO:QUANT, or the address of a repository, its folder or its file at a hub."""
    for prefix in _HUB_PREFIXES:
        text = text.removeprefix(prefix)
    parts = urlsplit(text)
    if parts.scheme in ("http", "https"):
        page = _HUB_PAGE.fullmatch(unquote(parts.path))
        if page is None:
            return None
        repo, revision, below = page.groups()
        hub = HubName(repo, revision=revision or "main")
        if below and below.lower().endswith(".gguf"):
            return replace(hub, file=below)
        return replace(hub, quant=below.strip("/")) if below else hub
    match = _HUB_NAME.fullmatch(text)
    return HubName(match["repo"], match["quant"]) if match else None


def is_path(text: str) -> bool:
    """Something on disk, or something that only a path looks like."""
    try:
        path = Path(text).expanduser()
        if path.exists() or path.is_symlink():
            return True
        first, *more = Path(text).parts or ("",)
        if more and Path(first).is_dir():  # models/glm.gguf with a slip of the finger, where models/ exists
            return True
    except (OSError, ValueError, RuntimeError):
        return True  # resolve_model says what is wrong with it
    if "://" in text or text.startswith(_HUB_PREFIXES):
        return False
    if glob.has_magic(text):
        return True
    return (
        text.startswith(("/", "~", "."))
        or text.lower().endswith(".gguf")
        or text.count("/") > 1
        or bool({"\\", "\0"} & set(text))
    )


def _of_recipe(name: str, asked: str | None) -> Path | HubName:
    recipe = find_recipe(name)
    assert recipe is not None
    if recipe.repo is None:
        if asked:
            raise ConfigError(f"the recipe {recipe.name} has one set of files, so leave out ':{asked}'")
        from server.store.source import demo_model, tiny_glm_model  # which import this module

        return demo_model() if recipe.package else tiny_glm_model()
    wanted = asked or recipe.default_quant
    known = recipe.find_quant(wanted) if wanted else None
    if known is None:
        return HubName(recipe.repo, wanted, revision=recipe.revision)
    return HubName(known.repo, known.name, pattern=known.pattern, revision=known.revision)
