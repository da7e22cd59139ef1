"""The recipes keep their schema, say where each number is from, and advise flags that the command line takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.chat.glm_generation import Generation
from server.cli.command import read_settings
from server.errors import ConfigError
from server.gguf import read_header
from server.store.recipes import RECIPES_FOLDER, BoxClass, Recipe, find_recipe, load_recipes, read_recipe, recipe_named
from server.store.source import demo_model, tiny_glm_model

RECIPES = load_recipes()
NAMES = [recipe.name for recipe in RECIPES]

LEAST = """
name = "m"
title = "M"
architecture = "llama"
dialect = "plain"
license = "MIT"
repo = "a/b"
default_quant = "Q"
[context]
n_tokens = 5
source = "s"
[quants.Q]
pattern = "*"
"""


@pytest.fixture(params=RECIPES, ids=NAMES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    given: Recipe = request.param
    return given


def test_the_models_that_were_promised_are_there() -> None:
    assert {
        *("glm-5.2", "glm-5.1", "glm-5", "glm-5.3-flash", "glm-4.7", "glm-4.7-flash", "glm-4.6", "glm-4.5"),
        *("glm-4.5-air", "tiny-glm", "demo"),
    } <= set(NAMES)
    assert NAMES[-2:] == ["tiny-glm", "demo"]  # what needs no download comes last
    assert RECIPES_FOLDER.is_dir()


def test_a_file_is_named_as_its_recipe() -> None:
    for file in RECIPES_FOLDER.glob("*.toml"):
        assert read_recipe(file).name == file.stem


def test_no_name_stands_for_two_recipes() -> None:
    names = [name.lower() for recipe in RECIPES for name in (recipe.name, *recipe.aliases)]
    assert len(names) == len(set(names))


def test_the_dialect_is_one_that_is_spoken(recipe: Recipe) -> None:
    assert recipe.dialect == "plain" or recipe.dialect in list(Generation)


def test_sources_say_more_than_nothing(recipe: Recipe) -> None:
    sources = [recipe.context.source, *(advice.source for advice in recipe.boxes)]
    sources += [quant.source for quant in recipe.quants.values() if quant.source is not None]
    sources += [recipe.sampling.source] if recipe.sampling else []
    for source in sources:
        assert "https://" in source or "computed" in source or ".md" in source or "header" in source
        assert "shared" not in source


def test_a_quant_knows_its_repository(recipe: Recipe) -> None:
    for name, quant in recipe.quants.items():
        assert (quant.name, quant.revision) == (name, "main")
        assert quant.repo.count("/") == 1
        assert recipe.find_quant(name.lower()) is quant
    assert recipe.find_quant("no-such-quant") is None


def test_the_command_line_takes_the_flags_that_are_advised(recipe: Recipe) -> None:
    assert recipe.repo is None or [advice.box for advice in recipe.boxes] == list(BoxClass)
    sampling = list(recipe.sampling.flags) if recipe.sampling else []
    for advice in recipe.boxes:
        settings = read_settings(["--gguf", recipe.name, *advice.arguments, *sampling], {})
        assert not settings.warnings
        n_slots = settings["parallel"]
        assert settings["ctx-size"] // n_slots <= recipe.context.n_tokens
        n_gpus = int(str(advice.box).split("x", maxsplit=1)[0]) if "x" in advice.box else 1
        assert len(settings["tensor-split"] or [1]) == n_gpus
        assert recipe.advice(advice.box) is advice


def test_local_models_are_as_their_recipes_say() -> None:
    for name, path in (("tiny-glm", tiny_glm_model()), ("demo", demo_model())):
        recipe = recipe_named(name)
        header = read_header(path)
        assert header.architecture == recipe.architecture
        assert header.integer(f"{recipe.architecture}.context_length") == recipe.context.n_tokens
        assert [path.with_name(file.name).stat().st_size for file in recipe.shards] == [
            file.size_bytes for file in recipe.shards
        ]


def test_recipes_are_found_by_name_and_alias_in_any_case() -> None:
    for name in ("glm-5.2", "GLM-5.2", "glm5.2", "zai-org/GLM-5.2", " unsloth/glm-5.2-gguf "):
        found = find_recipe(name)
        assert found is not None
        assert found.name == "glm-5.2"
    assert find_recipe("glm-9") is None


def test_a_wrong_name_is_answered_with_near_ones_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_named("glm-5,2")
    assert caught.value.message.startswith("there is no recipe 'glm-5,2'; did you mean glm-5.2")
    assert "glm-4.5-air" in caught.value.message
    with pytest.raises(ConfigError, match=r"there is no recipe 'llama'; there are recipes for glm-5\.3-flash, "):
        recipe_named("llama")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("pattern", 'patern = "x"\npattern'), "unknown field `patern`"),
        (('pattern = "*"', 'pattern = "*"\nsize_bytes = 5'), "a number needs the source"),
        (('"Q"', '"R"'), "default_quant is 'R', which is none of its quants"),
        (('repo = "a/b"', ""), "exactly one of repo, directory and package"),
        (('repo = "a/b"', 'repo = "a/b"\npackage = "p"'), "exactly one of repo, directory and package"),
        (("n_tokens = 5", "n_tokens = 'five'"), r"Expected `int`, got `str`"),
        (('source = "s"', ""), "missing required field `source`"),
        (("[context]", '[[boxes]]\nbox = "9x9"\nflags = ""\nsource = "s"\n[context]'), "Invalid enum value '9x9'"),
        (("[context]", '[[boxes]]\nbox = "cpu"\nquant = "R"\nflags = ""\nsource = "s"\n[context]'), "quant 'R'"),
        (("[context]", "[context"), "not valid"),
    ],
)
def test_a_recipe_that_departs_from_the_schema_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(LEAST)
    assert read_recipe(file).repo == "a/b"
    file.write_text(LEAST.replace(*change))
    with pytest.raises(ConfigError, match="the recipe") as caught:
        read_recipe(file)
    assert words in caught.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")
