"""What is on this machine: in the models folder and in the cache of the hub's client."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.store.local import LocalModel, find_local, local_models, without_recipe
from server.store.recipes import Quant, load_recipes
from tests.support.gguf_bytes import Gguf, write_shards


def quant(name: str, repo: str = "o/r-GGUF") -> Quant:
    return Quant(pattern=f"{name}/*.gguf", repo=repo, name=name)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "o--r-GGUF" / "Q4_K_M"
    folder.mkdir(parents=True)
    write_shards(folder, 3, "r-Q4_K_M")
    return tmp_path / "models"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """The cache: names are links to blobs."""
    repo = tmp_path / "hub" / "models--o--r-GGUF"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("c" * 40)
    (snapshot / "Q8_0").mkdir(parents=True)
    for name in ("Q8_0/r-Q8_0-00001-of-00001.gguf", "r-IQ2_M.gguf", "mmproj-F16.gguf"):
        blob = Gguf().write(repo / "blobs" / name.replace("/", "_"))
        (snapshot / name).symlink_to(blob)
    (tmp_path / "hub" / "datasets--o--d").mkdir()
    (tmp_path / "hub" / "version.txt").write_text("1")
    return tmp_path / "hub"


def test_both_places_are_looked_at(models: Path, hub: Path) -> None:
    found = local_models(models, hub)
    assert [(each.repo, each.folder, each.name, each.n_shards, each.whole) for each in found] == [
        ("o/r-GGUF", "Q4_K_M", "r-Q4_K_M", 3, True),
        ("o/r-GGUF", "", "r-IQ2_M", 1, True),
        ("o/r-GGUF", "Q8_0", "r-Q8_0", 1, True),
    ]
    assert found[0].n_bytes == sum(file.stat().st_size for file in found[0].first.parent.iterdir())
    assert local_models(models / "none", hub / "none") == ()


def test_quants_are_found_by_folder_and_by_pattern(models: Path, hub: Path) -> None:
    found = local_models(models, hub)
    assert find_local(found, quant("Q4_K_M")) == found[0]
    assert find_local(found, quant("q4_k_m", "O/R-gguf")) == found[0]
    assert find_local(found, quant("Q8_0")) == found[2]
    assert find_local(found, Quant(pattern="*IQ2_M*.gguf", repo="o/r-GGUF", name="x")) == found[1]
    assert find_local(found, quant("Q8_0", "other/r-GGUF")) is None
    assert find_local(found, quant("Q6_K")) is None


def test_an_interrupted_download_is_no_whole_model(models: Path, tmp_path: Path) -> None:
    folder = models / "o--r-GGUF" / "Q4_K_M"
    second = folder / "r-Q4_K_M-00002-of-00003.gguf"
    second.rename(folder / f"{second.name}.part")
    (found,) = local_models(models, tmp_path / "none")
    assert (found.n_here, found.n_shards, found.whole) == (2, 3, False)
    for file in folder.glob("*.gguf"):
        file.unlink()
    (found,) = local_models(models, tmp_path / "none")
    assert (found.n_here, found.n_bytes) == (0, 0)
    (folder / "notes.txt.part").write_text("x")
    assert len(local_models(models, tmp_path / "none")) == 1


def test_a_whole_one_is_taken_before_a_part() -> None:
    part = LocalModel("o/r-GGUF", "Q4_K_M", Path("a.gguf"), 2, 1, 5)
    whole = LocalModel("o/r-GGUF", "Q4_K_M", Path("b.gguf"), 2, 2, 9)
    assert find_local([part, whole], quant("Q4_K_M")) is whole


def test_what_no_recipe_knows_is_told_apart(models: Path, tmp_path: Path) -> None:
    known = models / "unsloth--GLM-5.2-GGUF" / "UD-IQ2_M"
    known.mkdir(parents=True)
    write_shards(known, 2, "GLM-5.2-UD-IQ2_M")
    found = local_models(models, tmp_path / "none")
    recipes = load_recipes()
    assert [each.repo for each in without_recipe(found, recipes)] == ["o/r-GGUF"]
    glm = next(recipe for recipe in recipes if recipe.name == "glm-5.2")
    here = find_local(found, glm.quants["UD-IQ2_M"])
    assert here is not None
    assert here.whole
