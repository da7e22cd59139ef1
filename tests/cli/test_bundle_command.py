"""What `bundle create` makes of its flags, and that each verb says in one sentence what it lacks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from server.cli import main
from server.cli.commands import bundle
from server.cli.commands.bundle import SPEC, ByteSize
from server.cli.subcommand import read_call
from server.cli.values import BadValue
from server.store.bundle.create import Order
from server.store.recipes import RECIPES_FOLDER


def order(*arguments: str) -> Order:
    return bundle._order(read_call(SPEC, ["create", *arguments], {}))


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("64G", 64 * 10**9), ("60GiB", 60 * 2**30), ("1.5t", 15 * 10**11), ("500 MB", 5 * 10**8), ("12", 12)],
)
def test_sizes_are_read_as_on_a_disks_label(text: str, n_bytes: int) -> None:
    assert ByteSize().parse(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "64X", "-1G", "iG", "64i"])
def test_other_texts_are_no_size(text: str) -> None:
    with pytest.raises(BadValue, match="64G"):
        ByteSize().parse(text)


def test_a_recipe_that_comes_with_the_project_is_packed_with_its_settings() -> None:
    made = order("tiny-glm", "--box", "cpu", "--python", "3.12")
    assert (made.name, made.model_licence, made.target.python) == ("tiny-glm", "MIT", (3, 12))
    assert len(made.shards) == 3
    assert tomllib.loads(made.settings) == {"alias": ["tiny-glm"], "parallel": 2, "temp": 0.0}
    assert made.recipe == RECIPES_FOLDER / "tiny-glm.toml"


def test_a_path_is_packed_under_its_files_name(tmp_path: Path) -> None:
    shard = order("tiny-glm").shards[0]
    made = order(str(shard))
    assert (made.name, made.recipe) == ("tiny-glm", None)
    assert tomllib.loads(made.settings) == {"alias": ["tiny-glm"]}


def test_settings_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    config = tmp_path / "far.toml"
    config.write_text("# ours\nparallel = 8\n")
    assert order("tiny-glm", "--config", str(config)).settings == "# ours\nparallel = 8\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "tiny-glm"), "bundle create needs --to"),
        (("create", "glm-5.2", "--to", "x"), "run 'python -m server fetch unsloth/GLM-5.2-GGUF:UD-Q4_K_M' first"),
        (("create", "tiny-glm", "--to", "x", "--box", "8x80"), "no advice for 'tiny-glm' on it"),
        (("create", "tiny-glm", "--to", "x", "--config", "/nowhere"), "there is no such file"),
        (("create", "/nowhere/m.gguf", "--to", "x"), "there is no file"),
        (("verify", "/nowhere"), "no such folder"),
        (("install", "/nowhere"), "bundle install needs --prefix"),
        (("split", "/nowhere", "--to", "x"), "bundle split needs --size"),
        (("split", "/nowhere", "--to", "x", "--size", "64"), "too small"),
        (("join", "--to", "x"), "needs PIECE"),
    ],
)
def test_what_is_lacking_is_said_in_one_sentence(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", *arguments]) in (2, 3)
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_settings_with_a_model_path_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "far.toml"
    config.write_text('gguf = "/here"\n')
    assert main(["bundle", "create", "tiny-glm", "--to", "x", "--config", str(config)]) == 2
    assert "which sets gguf" in capsys.readouterr().err
