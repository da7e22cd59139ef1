"""The manifest beside fetched files: written whole, read strictly, several quants side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import ModelFileError
from server.store.manifest import MANIFEST_NAME, FileRecord, FileSet, find_record, read_manifest, write_manifest

A = "a" * 64


def a_set(quant: str = "Q4_K_M", revision: str = "r1", *names: str) -> FileSet:
    return FileSet("o/r", revision, quant, tuple(FileRecord(name, 5, A) for name in names or ("m.gguf",)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) == ()
    files = FileSet("o/r", "abc", "Q4_K_M", (FileRecord("m.gguf", 5, A), FileRecord("Q/README.md", 7)))
    assert write_manifest(tmp_path, files) == tmp_path / MANIFEST_NAME
    assert read_manifest(tmp_path) == (files,)
    assert files.hub_name == "o/r:Q4_K_M"
    assert files.n_bytes == 12
    assert [file.name for file in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_quants_side_by_side_leave_each_other(tmp_path: Path) -> None:
    for files in (a_set(), a_set("Q8_0", "r1", "m8.gguf"), a_set(revision="r2")):
        write_manifest(tmp_path, files)
    sets = read_manifest(tmp_path)
    assert [(each.quant, each.revision) for each in sets] == [("Q8_0", "r1"), ("Q4_K_M", "r2")]
    found = find_record(tmp_path / "m8.gguf")
    assert found is not None
    assert (found.files.quant, found.record.size_bytes) == ("Q8_0", 5)
    assert found.repair_command == f"python -m server fetch o/r:Q8_0 --to {tmp_path} --repair"
    assert find_record(tmp_path / "other.gguf") is None


def test_a_manifest_may_lie_above_the_files(tmp_path: Path) -> None:
    write_manifest(tmp_path, a_set("Q4_K_M", "r1", "Q4_K_M/m.gguf"))
    write_manifest(tmp_path, FileSet(None, None, None, (FileRecord("x/y/z/m.gguf", 5),)))
    found = find_record(tmp_path / "Q4_K_M" / "m.gguf")
    assert found is not None
    assert found.folder == tmp_path
    without_hub = find_record(tmp_path / "x" / "y" / "z" / "m.gguf")
    assert without_hub is not None
    assert without_hub.repair_command is None
    assert find_record(tmp_path / "m.gguf") is None


def test_a_damaged_manifest_is_refused_in_a_sentence_and_written_anew(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text('{"format": 1, "sets": [{"re')
    with pytest.raises(ModelFileError, match=r"is damaged: .*; remove it and fetch the model again"):
        read_manifest(tmp_path)
    assert find_record(tmp_path / "m.gguf") is None
    write_manifest(tmp_path, a_set())
    assert read_manifest(tmp_path) == (a_set(),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "../m.gguf"}, "no file name below"),
        ({"name": "/m.gguf"}, "no file name below"),
        ({"name": ""}, "no file name below"),
        ({"size_bytes": -1}, "negative"),
        ({"sha256": "A" * 64}, "64 hexadecimal digits"),
        ({"size_bytes": "5"}, "Expected `int`"),
    ],
)
def test_records_are_checked(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    record = {"name": "m.gguf", "size_bytes": 5, "sha256": A} | change
    files = {"repo": None, "revision": None, "quant": None, "files": [record]}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"format": 1, "sets": [files]}))
    with pytest.raises(ModelFileError, match=words):
        read_manifest(tmp_path)


def test_a_later_format_says_so(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text('{"format": 2, "sets": []}')
    with pytest.raises(ModelFileError, match="has format 2, but this version reads 1"):
        read_manifest(tmp_path)
