"""The command models: a table of recipes with what is here, and all about one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.cli import main
from server.cli.models_display import json_text, list_text
from server.cli.this_box import Memory
from server.store.local import local_models
from server.store.recipes import load_recipes
from tests.support.gguf_bytes import write_shards


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "GLMSERVE_MODELS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("server.cli.this_box.memory_here", lambda _environment: Memory((85 * 10**9,) * 8, 10**12))
    return tmp_path


def put(folder: Path, stem: str, n_shards: int = 2) -> Path:
    folder.mkdir(parents=True)
    return write_shards(folder, n_shards, stem)[0]


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["models", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def row(lines: list[str], *words: str) -> list[str]:
    (found,) = [line.split() for line in lines if line.split()[: len(words)] == list(words)]
    return found[len(words) :]


def test_recipes_are_listed_with_what_is_here(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = home / "cache" / "glmserve" / "models"
    first = put(models / "unsloth--GLM-5.2-GGUF" / "UD-Q3_K_M", "GLM-5.2-UD-Q3_K_M")
    part = put(models / "unsloth--GLM-5.2-GGUF" / "UD-IQ2_M", "GLM-5.2-UD-IQ2_M", 3)
    part.unlink()
    lines = listed(capsys)
    assert lines[0].split() == ["MODEL", "QUANT", "SIZE", "SHARDS", "HERE", "THIS", "BOX"]
    assert row(lines, "glm-5.2", "UD-Q4_K_M", "*") == ["466.0", "GB", "11", "no", "fits", "the", "GPUs"]
    assert row(lines, "UD-IQ4_NL") == ["unknown", "9", "no", "unknown"]
    assert row(lines, "UD-Q3_K_M") == [*size_words(first), "2", str(first), "fits", "the", "GPUs"]
    assert "2 of 3 files in " + str(part.parent) in "\n".join(lines)
    assert row(lines, "tiny-glm") == ["2.0", "MB", "3", "yes", "fits"]
    assert lines[-1] == (
        "This box: 8 GPUs (85.0 GB), 1.0 TB of RAM. What is here was planned with the server's defaults; the rest goes "
        "by size alone."
    )
    assert "OTHER MODELS HERE" not in "\n".join(lines)


def size_words(first: Path) -> list[str]:
    return [f"{sum(file.stat().st_size for file in first.parent.iterdir())}", "B"]


def test_the_folder_may_be_another_and_others_are_listed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = put(home / "mine" / "o--r" / "Q4", "other")
    cached = put(home / "hf" / "hub" / "models--unsloth--GLM-5-GGUF" / "snapshots" / "c" / "UD-IQ2_XXS", "GLM-5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home / "hf"))
        lines = listed(capsys, "--models-dir", str(home / "mine"))
    assert row(lines, "OTHER", "MODELS", "HERE") == ["REPOSITORY", "SIZE", "SHARDS", "HERE"]
    assert row(lines, "other") == ["o/r", *size_words(first), "2", str(first)]
    assert str(cached) in "\n".join(lines)


def test_one_model_is_told_with_flags_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(listed(capsys, "GLM5.2"))
    assert text.startswith("GLM-5.2 (glm-5.2), MIT licence, architecture glm-dsa\n")
    assert "context   1,048,576 tokens (https://" in text
    assert "sampling  --temp 1 --top-p 0.95 (https://" in text
    assert "8x80: python -m server --gguf glm-5.2:UD-Q4_K_M --n-gpu-layers all --split-mode layer" in text
    assert "= 65 GiB on the fullest GPU" in text
    assert "files     " in "\n".join(listed(capsys, "tiny-glm"))


def test_a_wrong_name_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "glm-5.22"]) == 2
    assert "there is no recipe 'glm-5.22'; did you mean glm-5.2" in capsys.readouterr().err


def test_json_has_all_of_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = put(home / "cache" / "glmserve" / "models" / "unsloth--GLM-5.2-GGUF" / "UD-Q3_K_M", "GLM-5.2-UD-Q3_K_M")
    document = json.loads("\n".join(listed(capsys, "--json")))
    recipe = next(each for each in document["recipes"] if each["name"] == "glm-5.2")
    quants = {quant["name"]: quant for quant in recipe["quants"]}
    assert quants["UD-Q4_K_M"]["size_bytes"] == 466_000_000_000
    assert quants["UD-Q4_K_M"]["here"] is None
    assert quants["UD-Q3_K_M"]["here"]["file"] == str(first)
    assert quants["UD-Q3_K_M"]["here"]["whole"] is True
    assert recipe["n_ctx"] == 1048576
    assert recipe["sampling"] == ["--temp", "1", "--top-p", "0.95"]
    assert recipe["boxes"][0]["flags"][:2] == ["--n-gpu-layers", "all"]
    assert document["others"] == []


def test_a_judge_says_what_fits_this_box(home: Path) -> None:
    recipes, local = load_recipes(), local_models(home, home)
    text = list_text(recipes, local, judge=lambda recipe, quant, _model: f"{recipe.name} {quant.name} is judged")
    assert text.splitlines()[0].endswith("THIS BOX")
    assert "glm-5.2 UD-IQ2_M is judged" in text
    document = json.loads(json_text(recipes, local, judge=lambda *_: "fits"))
    assert {quant["this_box"] for recipe in document["recipes"] for quant in recipe["quants"]} == {"fits"}
    assert "\x1b[1m" in list_text(recipes, local, color=True)
