"""The check of a bundle: one changed byte of any file is found and named, interrupted checks go on, bagit agrees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import bagit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BundleError
from server.store.bundle import bag
from server.store.bundle.bag import STATE, files_below, manifest_text, read_manifest, sums_of
from server.store.bundle.install import report, verify
from tests.store.bundle.bundles import small_bundle

MODEL = "data/model/m-00002-of-00002.gguf"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle(tmp_path_factory.mktemp("bundle") / "original")


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def faulty(folder: Path) -> list[str]:
    return [fault.path for fault in verify(folder).faults]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x01
    path.write_bytes(content)


def test_a_bundle_as_it_was_made_has_no_fault(bundle: Path) -> None:
    checked = verify(bundle)
    assert checked.faults == []
    assert checked.n_files == len(list(files_below(bundle))) - 3  # the tag manifest, the seal, and what verify wrote
    assert report(bundle, checked)[-1].endswith("all as they were packed")


def test_the_bagit_library_finds_it_valid(bundle: Path) -> None:
    assert bagit.Bag(str(bundle)).validate()


def test_one_changed_byte_is_found_in_every_file_and_named(original: Path, tmp_path: Path) -> None:
    """First, middle and last byte of every single file, the checksum files among them."""
    bundle = Path(shutil.copytree(original, tmp_path / "bundle"))
    paths = [path for path in files_below(original) if path != STATE]
    classes = {"model", "wheels", "config", "licenses", "image", "recipe", "tools"}
    assert classes <= {part for path in paths for part in path.split("/")}
    for path in paths:
        whole = (bundle / path).read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1}:
            flip(bundle / path, at)
            assert path in faulty(bundle), (path, at)
            (bundle / path).write_bytes(whole)
    assert faulty(bundle) == []


@given(st.data())
def test_whatever_byte_of_a_checksum_file_changes_that_file_is_named(original: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["manifest-sha256.txt", "tagmanifest-sha256.txt", "seal-sha256.txt"]))
    whole = (original / name).read_bytes()
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        (original / name).write_bytes(changed)
        assert faulty(original) == [name]
    finally:
        (original / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), f"{MODEL} is missing; copy it again"),
        (lambda path: os.truncate(path, 700), f"{MODEL} is cut short: it has 700 bytes, but must have 2,000"),
        (lambda path: path.write_bytes(bytes(2001)), f"{MODEL} is too long"),
        (lambda path: path.write_bytes(bytes(2000)), f"{MODEL} is damaged: its checksum differs; copy it again"),
        (lambda path: (path.parent / "extra").write_text("x"), "data/model/extra does not belong to this bundle"),
    ],
)
def test_each_kind_of_damage_has_its_sentence(bundle: Path, spoil: object, words: str) -> None:
    spoil(bundle / MODEL)  # type: ignore[operator]
    (fault,) = verify(bundle).faults
    assert words in str(fault)


def test_a_large_file_is_damaged_in_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bag, "BLOCK_BYTES", 512)
    monkeypatch.setattr(bag, "_READ_BYTES", 100)
    bundle = small_bundle(tmp_path / "bundle")
    flip(bundle / MODEL, 600)
    (fault,) = verify(bundle).faults
    assert fault.what.startswith("is damaged within bytes 512 to 1,023 (1 of 4 blocks)")
    assert "skip=1 seek=1 count=1" in fault.what


def test_an_interrupted_check_goes_on_and_a_finished_one_begins_anew(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify(bundle).n_resumed == 0
    assert verify(bundle).n_resumed == 0  # the first one had finished
    state = bundle / STATE
    lines = state.read_text().splitlines()
    assert json.loads(lines.pop()) == {"finished": True}
    state.write_text("\n".join(lines[:5]) + "\n")  # as if it had been killed after five files
    checked = verify(bundle)
    assert (checked.n_resumed, checked.faults) == (5, [])
    assert verify(bundle, trust_finished=True).n_resumed == len(lines)


def test_a_file_that_changed_since_is_read_again(bundle: Path) -> None:
    verify(bundle)
    flip(bundle / MODEL, 5)
    assert [fault.path for fault in verify(bundle, trust_finished=True).faults] == [MODEL]


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such folder"):
        verify(tmp_path / "none")
    with pytest.raises(BundleError, match=r"neither bagit\.txt"):
        verify(tmp_path)


def test_install_py_checks_with_nothing_but_the_standard_library(bundle: Path) -> None:
    command = [sys.executable, "-I", "-S", str(bundle / "install.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    flip(bundle / MODEL, 0)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == BundleError.exit_code
    assert MODEL in done.stdout


@given(st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.just("0" * 64)))
def test_manifests_read_back_what_was_written(sums: dict[str, str]) -> None:
    paths = {f"data/{path}": sha256 for path, sha256 in sums.items() if bag.is_inside(path)}
    assert read_manifest(manifest_text(paths)) == paths


@pytest.mark.parametrize("line", ["", "xyz  data/a", "0" * 64 + " data/a", "0" * 64 + "  ../a", "0" * 64 + "  /etc/a"])
def test_lines_that_are_no_manifest_are_refused(line: str) -> None:
    with pytest.raises(ValueError):
        read_manifest(line + "\n")


@given(st.integers(0, 3000), st.sampled_from([64, 512, 1000]))
def test_sums_do_not_depend_on_how_a_file_is_read(n_bytes: int, block: int) -> None:
    import hashlib
    import tempfile
    import zlib

    content = bytes(i * 7 % 251 for i in range(n_bytes))
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bag, "BLOCK_BYTES", block)
        patch.setattr(bag, "_READ_BYTES", 48)
        file.write(content)
        file.flush()
        sums = sums_of(Path(file.name))
    assert (sums.n_bytes, sums.sha256) == (n_bytes, hashlib.sha256(content).hexdigest())
    assert sums.blocks == tuple(zlib.crc32(content[i : i + block]) for i in range(0, n_bytes, block))
