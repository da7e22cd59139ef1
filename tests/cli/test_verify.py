"""The command verify: what it shows, and its exit codes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import main
from server.cli.tables import size_text
from server.cli.verify_display import progress_for, report_text
from server.store.recipes import load_recipes
from server.store.source import tiny_glm_model
from server.store.verify import VerifyOptions, verify
from tests.support.fake_hub import FakeHub
from tests.support.gguf_bytes import write_shards


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_glm_model().parent, folder)
    return folder


def test_a_good_model_ends_with_0(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["FILE", "SIZE", "STATE", "COMPARED", "WITH"]
    assert lines[1].split() == ["tiny-glm-00001-of-00003.gguf", "748.0", "kB", "ok", "the", "recipe", "tiny-glm"]
    assert lines[-1].startswith("all right: 3 files, 2.0 MB (2.0 MB read in ")
    assert err == "reading 3 files, 2.0 MB\n"
    assert len(list((cache / "glmserve" / "digests").iterdir())) == 3
    assert main(["verify", str(model)]) == 0
    assert "3 unchanged since they were last read (--again reads them anew)" in capsys.readouterr().out
    assert main(["verify", "--again", str(model / "tiny-glm-00002-of-00003.gguf")]) == 0
    assert "2.0 MB read in" in capsys.readouterr().out


def test_a_bad_one_ends_with_1_and_a_sentence_for_each_fault(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second, third = model / "tiny-glm-00002-of-00003.gguf", model / "tiny-glm-00003-of-00003.gguf"
    second.write_bytes(second.read_bytes()[:-1000])
    third.write_bytes(third.read_bytes()[:-1] + b"\xff")
    assert main(["verify", str(model)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:4]] == ["ok", "bad", "bad"]
    faults = [line for line in lines if line.startswith("fault: ")]
    assert faults[0].startswith(f"fault: '{second}' is cut short: its tensors end at byte ")
    assert faults[1].startswith(f"fault: '{third}' is not the file that the recipe tiny-glm has: ")
    assert lines[-1].startswith("2 faults: 3 files")


def test_a_wrong_call_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify"]) == 2
    assert main(["verify", str(tmp_path), "--threads", "0"]) == 2
    assert "there is no file or folder" in capsys.readouterr().err


def test_json_has_all_of_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = model / "tiny-glm-00001-of-00003.gguf"
    first.write_text("<html>")
    assert main(["verify", str(model), "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["ok"] is False
    assert document["path"] == str(model)
    (fault,) = document["faults"]
    assert (fault["kind"], fault["file"], fault["byte"]) == ("web page", str(first), 0)
    assert fault["remedy"] == "fetch the file itself"
    assert [file["state"] for file in document["files"]] == ["bad", "ok", "ok"]
    assert document["files"][1]["sha256"] == document["files"][1]["expected_sha256"]
    assert document["files"][1]["compared_with"] == "the recipe tiny-glm"


def test_sums_are_shown_where_nothing_says_what_they_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_shards(folder)
    assert main(["verify", str(folder), "--threads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("SHA-256")
    assert lines[4].startswith("note: nothing says what the sums of 3 files should be")
    assert main(["verify", str(folder), "--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("(no weights read)")


def test_a_terminal_gets_colors_and_bars(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_for(quiet=False) as progress:
        report = verify(model, VerifyOptions(progress=progress, recipes=load_recipes()))
    text = report_text(report, 1.0, color=True)
    assert "\x1b[32mok" in text
    assert report.ok


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with two quants of one model."""
    files = {}
    for quant in ("Q4_K_M", "Q8_0"):
        (tmp_path / quant).mkdir()
        for shard in write_shards(tmp_path / quant, 2, f"m-{quant}"):
            files[f"{quant}/{shard.name}"] = shard.read_bytes()
    with FakeHub() as hub:
        hub.add("o/m-GGUF", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("GLMSERVE_MODELS_DIR", str(tmp_path / "mod els"))
        yield hub


def test_what_was_fetched_is_verified_by_name_and_mended_by_the_command(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "o/m-GGUF:Q4_K_M"]) == 0
    assert main(["verify", "o/m-GGUF:q4_k_m", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))
    assert [file["state"] for file in document["files"]] == ["ok", "ok"]
    assert document["files"][0]["compared_with"].startswith("o/m-GGUF at ")
    bad = Path(document["files"][1]["file"])
    assert bad.parent == tmp_path / "mod els" / "o--m-GGUF" / "Q4_K_M"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-1] + b"\xff")
    assert main(["verify", "o/m-GGUF:Q4_K_M"]) == 1
    (fault,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    command = shlex.split(fault.partition("; run: ")[2])
    assert command[:3] == ["python", "-m", "server"]
    assert main(command[3:]) == 0
    assert bad.read_bytes() == whole
    assert main(["verify", str(bad)]) == 0


def test_a_name_must_be_here(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "o/m-GGUF:Q4_K_M"]) == 2
    assert "get it: python -m server fetch o/m-GGUF:Q4_K_M" in capsys.readouterr().err
    for quant in ("Q4_K_M", "Q8_0"):
        folder = tmp_path / "mod els" / "o--m-GGUF" / quant
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / quant / f"m-{quant}-00002-of-00002.gguf", folder)
    assert main(["verify", "o/m-GGUF:Q8_0"]) == 1
    assert "number 1 is missing" in capsys.readouterr().out
    assert main(["verify", "o/m-GGUF"]) == 2
    assert "'o/m-GGUF' may be one of '" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (466_000_000_000, "466.0 GB"), (1_510_000_000_000, "1.5 TB")],
)
def test_sizes_are_as_the_hub_writes_them(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text
