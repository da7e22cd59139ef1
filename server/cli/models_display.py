"""What `models` shows: a table of recipes, or all that is known about one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from server.cli.tables import plain_table, rich_table, size_text
from server.errors import ModelFileError
from server.store.local import LocalModel, find_local, without_recipe
from server.store.recipes import Quant, Recipe
from server.store.source import demo_model, tiny_glm_model

# Says in a few words whether a quant fits this box; the model is given where it is here.
Judge = Callable[[Recipe, Quant, LocalModel | None], str]

_FOOT = (
    "* is taken where no quant is named. Sizes that nobody published are unknown until the model is fetched.",
    "python -m server models NAME tells more about one, python -m server fetch NAME:QUANT gets it.",
)


def list_text(
    recipes: Sequence[Recipe], local: Sequence[LocalModel], *, color: bool = False, judge: Judge | None = None
) -> str:
    """The table of recipes, and one of what is here besides. With a judge it has one column more."""
    heads = ("MODEL", *_heads(judge))
    tables = [(heads, [row for recipe in recipes for row in _rows(recipe, local, judge)])]
    others = without_recipe(local, recipes)
    if others:
        rows = [(each.name, each.repo, size_text(each.n_bytes), str(each.n_shards), _here(each)) for each in others]
        tables.append((("OTHER MODELS HERE", "REPOSITORY", "SIZE", "SHARDS", "HERE"), list(rows)))
    lines: list[str] = []
    for names, rows_of in tables:
        lines += [rich_table(names, rows_of)] if color else plain_table(names, rows_of)
        lines.append("")
    return "\n".join([*lines, *_FOOT]) + "\n"


def _heads(judge: Judge | None) -> tuple[str, ...]:
    return ("QUANT", "SIZE", "SHARDS", "HERE", *(("THIS BOX",) if judge else ()))


def _rows(recipe: Recipe, local: Sequence[LocalModel], judge: Judge | None) -> list[tuple[str, ...]]:
    if recipe.repo is None:
        total = size_text(sum(file.size_bytes for file in recipe.shards))
        here = "yes" if _own_file(recipe) else "no"
        return [(recipe.name, "", total, str(len(recipe.shards)), here, *(("fits",) if judge else ()))]
    rows: list[tuple[str, ...]] = []
    for quant in recipe.quants.values():
        model = find_local(local, quant)
        n_shards = model.n_shards if model else quant.n_shards
        size = model.n_bytes if model and model.whole else quant.size_bytes
        row = (
            recipe.name if not rows else "",
            quant.name + (" *" if quant.name == recipe.default_quant else ""),
            "unknown" if size is None else size_text(size),
            "" if n_shards is None else str(n_shards),
            _here(model),
        )
        rows.append((*row, judge(recipe, quant, model)) if judge else row)
    return rows


def _here(model: LocalModel | None) -> str:
    if model is None:
        return "no"
    return str(model.first) if model.whole else f"{model.n_here} of {model.n_shards} files in {model.first.parent}"


def _own_file(recipe: Recipe) -> str | None:
    """Where the model of a recipe is that needs no download. None: it is not installed."""
    try:
        return str(tiny_glm_model() if recipe.directory else demo_model())
    except ModelFileError:
        return None


def one_text(recipe: Recipe, local: Sequence[LocalModel], *, judge: Judge | None = None) -> str:
    lines = [
        f"{recipe.title} ({recipe.name}), {recipe.license} licence, architecture {recipe.architecture}",
        f"  files     {_place(recipe)}",
        f"  context   {recipe.context.n_tokens:,} tokens ({recipe.context.source})",
    ]
    if recipe.sampling:
        lines.append(f"  sampling  {' '.join(recipe.sampling.flags)} ({recipe.sampling.source})")
    if recipe.aliases:
        lines.append(f"  also      {', '.join(recipe.aliases)}")
    lines += ["", *plain_table(_heads(judge), [row[1:] for row in _rows(recipe, local, judge)])]
    for advice in recipe.boxes:
        model = f"{recipe.name}:{advice.quant}" if advice.quant else recipe.name
        lines += ["", f"{advice.box}: python -m server --gguf {model} {advice.flags}", f"  {advice.source}"]
    return "\n".join(lines) + "\n"


def _place(recipe: Recipe) -> str:
    if recipe.repo is not None:
        return f"{recipe.repo} at the hub, revision {recipe.revision}"
    return _own_file(recipe) or f"not installed ({recipe.directory or recipe.package})"


def json_text(recipes: Sequence[Recipe], local: Sequence[LocalModel], *, judge: Judge | None = None) -> str:
    document = {
        "recipes": [_recipe_object(recipe, local, judge) for recipe in recipes],
        "others": [_local_object(model) for model in without_recipe(local, recipes)],
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _recipe_object(recipe: Recipe, local: Sequence[LocalModel], judge: Judge | None) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "title": recipe.title,
        "aliases": list(recipe.aliases),
        "repo": recipe.repo,
        "revision": recipe.revision if recipe.repo else None,
        "license": recipe.license,
        "architecture": recipe.architecture,
        "dialect": recipe.dialect,
        "n_ctx": recipe.context.n_tokens,
        "default_quant": recipe.default_quant,
        "file": _own_file(recipe) if recipe.repo is None else None,
        "quants": [_quant_object(recipe, quant, find_local(local, quant), judge) for quant in recipe.quants.values()],
        "sampling": list(recipe.sampling.flags) if recipe.sampling else [],
        "boxes": [
            {"box": advice.box.value, "quant": advice.quant, "flags": advice.arguments, "source": advice.source}
            for advice in recipe.boxes
        ],
    }


def _quant_object(recipe: Recipe, quant: Quant, model: LocalModel | None, judge: Judge | None) -> dict[str, Any]:
    return {
        "name": quant.name,
        "repo": quant.repo,
        "n_shards": quant.n_shards,
        "size_bytes": quant.size_bytes,
        "source": quant.source,
        "here": _local_object(model) if model else None,
        "this_box": judge(recipe, quant, model) if judge else None,
    }


def _local_object(model: LocalModel) -> dict[str, Any]:
    return {
        "repo": model.repo,
        "file": str(model.first),
        "n_shards": model.n_shards,
        "n_here": model.n_here,
        "n_bytes": model.n_bytes,
        "whole": model.whole,
    }
