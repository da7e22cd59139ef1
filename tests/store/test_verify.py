"""Verifying models down to the last byte: sums from every list that may lie about, zeros, kept sums."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ConfigError, ModelFileError
from server.store.digest import digest_file, digest_files
from server.store.faults import Fault, FaultKind
from server.store.holes import LEAST_BYTES
from server.store.manifest import MANIFEST_NAME, FileRecord, FileSet, write_manifest
from server.store.recipes import load_recipes
from server.store.source import tiny_glm_model
from server.store.verify import Progress, Report, VerifyOptions, verify
from tests.support.gguf_bytes import Gguf, Tensor, write_shards

N_BYTES = 4 * LEAST_BYTES


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def states(report: Report) -> dict[str, str]:
    return {each.file.name: each.state.value for each in report.files}


def only_fault(report: Report) -> Fault:
    (fault,) = report.faults
    assert "\n" not in fault.sentence
    assert not report.ok
    return fault


def write_model(path: Path) -> int:
    """One file with a tensor of ones; where that begins."""
    data = Gguf(tensors=[Tensor("blk.0.big", (N_BYTES // 4,), n_bytes=N_BYTES)]).data()
    start = len(data) - N_BYTES
    path.write_bytes(data[:start] + b"\1" * N_BYTES)
    return start


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as data:
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 0x10]))


def record(folder: Path, files: Sequence[Path]) -> None:
    records = tuple(FileRecord(str(file.relative_to(folder)), file.stat().st_size, sha256(file)) for file in files)
    write_manifest(folder, FileSet("o/r", "0123456789abcdef", "Q4_K_M", records))


def write_sums(list_file: Path, files: Sequence[Path], mark: str = "  ") -> None:
    root = list_file.parent
    list_file.write_text("".join(f"{sha256(file)}{mark}{file.relative_to(root)}\n" for file in files))


def as_bundle(folder: Path, files: Sequence[Path]) -> None:
    (folder / "bagit.txt").write_text("BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n")
    write_sums(folder / "manifest-sha256.txt", files)


def as_hub_folder(folder: Path, files: Sequence[Path]) -> None:
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for file in files:
        (notes / f"{file.name}.metadata").write_text(f"{'c' * 40}\n{sha256(file)}\n1764000000.0\n")


def as_hub_cache(folder: Path, files: Sequence[Path]) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for file in files:
        blob = blobs / sha256(file)
        file.rename(blob)
        file.symlink_to(Path("..", "blobs", blob.name))


LISTS: dict[str, Callable[[Path, Sequence[Path]], None]] = {
    "o/r at 0123456789ab": record,
    "the bundle's manifest": as_bundle,
    "SHA256SUMS": lambda folder, files: write_sums(folder / "SHA256SUMS", files, " *"),
    "the hub at cccccccccccc": as_hub_folder,
    "the hub's cache": as_hub_cache,
}


@pytest.mark.parametrize("source", LISTS)
def test_one_flipped_byte_is_found_by_every_list_of_sums(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards = write_shards(folder)
    LISTS[source](folder, shards)
    report = verify(folder, VerifyOptions())
    assert report.ok
    assert report.notes == ()
    assert set(states(report).values()) == {"ok"}
    assert {each.expected.source for each in report.files if each.expected} == {source}
    flip(shards[1], shards[1].stat().st_size - 10)
    fault = only_fault(verify(shards[0], VerifyOptions()))
    assert (fault.kind, fault.file) == (FaultKind.WRONG_HASH, shards[1])
    assert f"'{shards[1]}' is not the file that {source} has: the sum of its" in fault.cause
    assert sha256(shards[1])[:16] in fault.cause
    assert states(verify(folder, VerifyOptions())) == {
        shards[0].name: "ok",
        shards[1].name: "bad",
        shards[2].name: "ok",
    }


def test_the_way_out_is_the_command_that_gets_the_bad_parts(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    record(tmp_path, shards)
    flip(shards[2], shards[2].stat().st_size - 1)
    fault = only_fault(verify(tmp_path, VerifyOptions()))
    assert fault.remedy == f"run: python -m server fetch o/r:Q4_K_M --to {tmp_path} --repair"


def test_a_recipe_knows_the_files_of_tiny_glm(tmp_path: Path) -> None:
    shards = [Path(shutil.copy(file, tmp_path)) for file in sorted(tiny_glm_model().parent.glob("*.gguf"))]
    options = VerifyOptions(recipes=load_recipes())
    assert verify(tmp_path, options).ok
    flip(shards[0], 700_000)
    fault = only_fault(verify(tmp_path, options))
    assert "is not the file that the recipe tiny-glm has" in fault.cause
    shards[0].write_bytes(shards[0].read_bytes() + bytes(99))
    fault = only_fault(verify(tmp_path, options))
    assert (fault.kind, fault.byte) == (FaultKind.WRONG_SIZE, 747968)


def test_without_sums_a_model_is_whole_and_that_is_said(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    report = verify(tmp_path, VerifyOptions())
    assert report.ok
    assert states(report) == {"m.gguf": "whole"}
    assert report.files[0].sha256 == sha256(tmp_path / "m.gguf")
    assert "nothing says what the sums of one file should be" in report.notes[0]


def test_written_zeros_in_weights_are_found(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    start = write_model(file)
    first = -(-start // LEAST_BYTES) * LEAST_BYTES
    with open(file, "r+b") as data:
        data.seek(first)
        data.write(bytes(2 * LEAST_BYTES))
    fault = only_fault(verify(file, VerifyOptions()))
    assert (fault.kind, fault.byte, fault.end) == (FaultKind.ZEROS, first, first + 2 * LEAST_BYTES)
    assert f"bytes {first:,} to {first + 2 * LEAST_BYTES - 1:,}, in the tensor blk.0.big, are all zero" in fault.cause
    record(tmp_path, [file])  # the right sum vouches for them
    assert verify(file, VerifyOptions()).ok
    with open(file, "r+b") as data:
        data.seek(first)
        data.write(bytes(3 * LEAST_BYTES))
    fault = only_fault(verify(file, VerifyOptions()))  # the zeros explain the wrong sum
    assert (fault.kind, fault.end) == (FaultKind.ZEROS, first + 3 * LEAST_BYTES)
    assert "--repair" in fault.remedy


def test_a_hole_that_is_meant_is_told_by_the_sum(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    start = write_model(file)
    with open(file, "r+b") as data:  # zeros at the end, never written
        data.truncate(start + N_BYTES // 4)
        data.truncate(start + N_BYTES)
    fault = only_fault(verify(file, VerifyOptions()))
    assert fault.kind is FaultKind.HOLE
    assert "cp --sparse=never" in fault.remedy
    record(tmp_path, [file])
    assert states(verify(file, VerifyOptions())) == {"m.gguf": "ok"}
    assert only_fault(verify(file, VerifyOptions(quick=True))).kind is FaultKind.HOLE
    flip(file, start + 5)
    fault = only_fault(verify(file, VerifyOptions()))
    assert fault.kind is FaultKind.HOLE
    assert "--repair" in fault.remedy


def test_what_a_list_names_must_be_there(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("x")
    record(tmp_path, [*shards, readme])
    assert states(verify(tmp_path, VerifyOptions()))["README.md"] == "ok"
    readme.unlink()
    fault = only_fault(verify(tmp_path, VerifyOptions()))
    assert (fault.kind, fault.file) == (FaultKind.MISSING, readme)
    assert fault.cause == f"'{readme}' is missing, though o/r at 0123456789ab has it"
    shards[1].unlink()
    kinds = [(fault.kind, fault.file) for fault in verify(tmp_path, VerifyOptions()).faults]
    assert kinds == [(FaultKind.MISSING, shards[1]), (FaultKind.MISSING, readme)]
    shards[0].unlink()
    shards[2].unlink()
    assert len(verify(tmp_path, VerifyOptions()).faults) == 4


def test_several_models_and_folders_below_are_looked_at(tmp_path: Path) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        (tmp_path / "repo" / quant).mkdir(parents=True)
        write_shards(tmp_path / "repo" / quant, 2, quant)
    write_model(tmp_path / "repo" / "one.gguf")
    Gguf(pairs=[]).write(tmp_path / "repo" / "mmproj-F16.gguf")
    record(tmp_path / "repo", sorted((tmp_path / "repo").glob("Q8_0/*")))
    report = verify(tmp_path, VerifyOptions())
    assert report.ok
    assert sorted(states(report).values()) == ["ok", "ok", "whole", "whole", "whole"]


def test_a_bundle_names_its_disk(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "model"
    folder.mkdir(parents=True)
    shards = write_shards(folder)
    odd = folder / "a%b.txt"
    odd.write_text("x")
    as_bundle(tmp_path, [*shards, odd])
    listed = tmp_path / "manifest-sha256.txt"
    listed.write_text(listed.read_text().replace("a%b", "a%25b"))
    assert states(verify(tmp_path, VerifyOptions())) == {
        **{shard.name: "ok" for shard in shards},
        "a%b.txt": "ok",
    }
    flip(shards[0], shards[0].stat().st_size - 1)
    assert only_fault(verify(folder, VerifyOptions())).remedy == "copy this file from the bundle's disk again"


@settings(max_examples=40)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: f"{'a' * 64}  {text}\n".encode()))
def test_whatever_stands_in_a_list_is_read_or_told(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("m")
    write_shards(folder, 1)
    for name in ("SHA256SUMS", MANIFEST_NAME):
        (folder / name).write_bytes(content)
        for fault in verify(folder, VerifyOptions(quick=True)).faults:
            assert fault.kind in (FaultKind.MANIFEST, FaultKind.MISSING)
        (folder / name).unlink()


def test_a_list_names_only_what_is_below_it(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    (tmp_path / "SHA256SUMS").write_text(f"{'a' * 64}  ../x\n")
    assert "line 1 names a file that is none of its folder's" in only_fault(verify(tmp_path, VerifyOptions())).cause


def test_a_damaged_list_is_a_fault(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    (tmp_path / "SHA256SUMS").write_text("abc  m.gguf\n")
    fault = only_fault(verify(tmp_path, VerifyOptions()))
    assert fault.kind is FaultKind.MANIFEST
    assert "line 1 is no SHA-256 sum" in fault.cause
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / MANIFEST_NAME).write_text("{")
    fault = only_fault(verify(tmp_path, VerifyOptions()))
    assert fault.sentence.endswith("remove it and fetch the model again")


def test_faulty_files_are_not_read_again(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    shards[1].write_bytes(shards[1].read_bytes()[:-20])
    begun: list[str] = []
    progress = Progress(begin=lambda files: begun.extend(file.name for file, _ in files))
    report = verify(tmp_path, VerifyOptions(progress=progress))
    assert only_fault(report).kind is FaultKind.TRUNCATED
    assert begun == [shards[0].name, shards[2].name]


def test_quick_reads_no_weights(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    record(tmp_path, shards)
    flip(shards[1], shards[1].stat().st_size - 1)
    report = verify(tmp_path, VerifyOptions(quick=True))
    assert report.ok
    assert set(states(report).values()) == {"checked"}


def test_sums_are_kept_until_the_file_changes(tmp_path: Path) -> None:
    model, cache = tmp_path / "m", tmp_path / "cache"
    model.mkdir()
    shards = write_shards(model)
    record(model, shards)
    read: list[str] = []
    progress = Progress(begin=lambda files: read.extend(file.name for file, _ in files))
    options = VerifyOptions(cache=cache, progress=progress)
    assert not any(each.kept for each in verify(model, options).files)
    assert len(read) == 3
    assert all(each.kept for each in verify(model, options).files)
    assert len(read) == 3
    verify(model, VerifyOptions(cache=cache, progress=progress, again=True))
    assert len(read) == 6
    before = shards[1].stat()
    flip(shards[1], before.st_size - 1)
    os.utime(shards[1], ns=(before.st_atime_ns, before.st_mtime_ns))  # the change time tells on it
    assert only_fault(verify(model, options)).file == shards[1]
    assert read[6:] == [shards[1].name]
    for file in cache.iterdir():
        file.write_text("{")
    assert only_fault(verify(model, options)).file == shards[1]


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    (tmp_path / "cache").write_text("a file")
    assert verify(tmp_path / "m.gguf", VerifyOptions(cache=tmp_path / "cache")).ok


def test_leftovers_of_downloads_are_noted(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    (tmp_path / "m.gguf.part").write_bytes(b"x")
    report = verify(tmp_path, VerifyOptions(quick=True))
    assert report.ok
    assert "is what an interrupted download left, though the file itself is there" in report.notes[0]


def test_a_file_that_goes_away_is_unreadable(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    options = VerifyOptions(progress=Progress(begin=lambda _files: shards[1].unlink()))
    fault = only_fault(verify(tmp_path, options))
    assert (fault.kind, fault.file) == (FaultKind.UNREADABLE, shards[1])


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ModelFileError, match="Permission denied; give the user"):
        verify(tmp_path, VerifyOptions())


def test_nothing_to_verify_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        verify(tmp_path / "none", VerifyOptions())
    with pytest.raises(ConfigError, match=r"there is no \.gguf file in"):
        verify(tmp_path, VerifyOptions())
    file = tmp_path / "m-00001-of-00000.gguf"
    write_model(file)
    assert only_fault(verify(tmp_path, VerifyOptions())).kind is FaultKind.SHARD_NUMBER


def test_digests_of_many_files_are_right_and_tell_their_bytes(tmp_path: Path) -> None:
    files = []
    for number in range(5):
        file = tmp_path / f"{number}"
        file.write_bytes(os.urandom(number * 300_001) + bytes(number * LEAST_BYTES))
        files.append(file)
    told: dict[Path, int] = dict.fromkeys(files, 0)

    def advance(file: Path, n_bytes: int) -> None:
        told[file] += n_bytes

    found = dict(digest_files(files, 2, advance))
    for file in files:
        digest = found[file]
        assert not isinstance(digest, OSError)
        assert digest.sha256 == sha256(file)
        assert told[file] == file.stat().st_size
        assert digest == digest_file(file)
    none = tmp_path / "none"
    assert isinstance(dict(digest_files([none], 1, advance))[none], FileNotFoundError)


def test_zeros_are_whole_blocks(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"\1" * LEAST_BYTES + bytes(2 * LEAST_BYTES) + b"\0" * 5 + b"\1" + bytes(2 * LEAST_BYTES))
    zeros = digest_file(file).zeros
    assert zeros == ((LEAST_BYTES, 3 * LEAST_BYTES), (4 * LEAST_BYTES, 5 * LEAST_BYTES))
