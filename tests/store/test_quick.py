"""Every accident that the quick checks know, made on purpose: its own kind, file, byte and sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from server.errors import ModelFileError
from server.store.faults import Fault, FaultKind
from server.store.holes import LEAST_BYTES
from server.store.manifest import MANIFEST_NAME, FileRecord, FileSet, write_manifest
from server.store.quick import inspect_model
from server.store.source import resolve_model
from tests.support import gguf_bytes as raw
from tests.support.gguf_bytes import Array, Gguf, Tensor, split_pairs, write_shards

N_VALUES = LEAST_BYTES  # f32 values of a big tensor: four times as many bytes


def faults_of(file: Path) -> list[Fault]:
    faults = list(inspect_model(file).faults)
    for fault in faults:
        assert "\n" not in fault.sentence
        assert fault.sentence == f"{fault.cause}; {fault.remedy}"
    with pytest.raises(ModelFileError) as caught:
        resolve_model(file)
    assert caught.value.message == faults[0].sentence
    return faults


def only_fault(file: Path) -> Fault:
    (fault,) = faults_of(file)
    return fault


def write_big(path: Path, pairs: list[tuple[str, int, object]] | None = None) -> tuple[Path, int]:
    """A file with one big tensor of ones behind a small one; where the big one begins."""
    gguf = Gguf(tensors=[Tensor("small", (4,)), Tensor("blk.0.big", (N_VALUES,), n_bytes=4 * N_VALUES)])
    gguf.pairs += pairs or []
    data = gguf.data()
    start = len(data) - 4 * N_VALUES
    path.write_bytes(data[:start] + b"\1" * (4 * N_VALUES))
    return path, start


def test_a_good_set_has_no_faults(tmp_path: Path) -> None:
    inspection = inspect_model(write_shards(tmp_path)[1])
    assert inspection.faults == ()
    assert all(inspection.headers)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 5)
    shards[0].write_bytes(shards[0].read_bytes()[:-20])
    shards[1].unlink()
    shards[3].write_bytes(b"<html>502</html>")
    assert [(fault.kind, fault.file) for fault in faults_of(shards[0])] == [
        (FaultKind.MISSING, shards[1]),
        (FaultKind.TRUNCATED, shards[0]),
        (FaultKind.WEB_PAGE, shards[3]),
    ]


def test_a_pointer_tells_how_big_the_file_should_be(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    shards[1].write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 49712345678\n")
    fault = only_fault(shards[0])
    assert fault.kind is FaultKind.LFS_POINTER
    assert fault.sentence == (
        f"'{shards[1]}' is a Git LFS pointer, not the model file of 49,712,345,678 bytes itself; "
        f"run 'git lfs pull' in its folder, or fetch the file"
    )
    shards[1].write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "not the model file itself" in only_fault(shards[0]).sentence


def test_a_cut_file_names_the_byte(tmp_path: Path) -> None:
    path, start = write_big(tmp_path / "m.gguf")
    with open(path, "r+b") as file:
        file.truncate(start + 100)
    fault = only_fault(path)
    assert (fault.kind, fault.byte, fault.end) == (FaultKind.TRUNCATED, start + 100, start + 4 * N_VALUES)


@pytest.mark.parametrize("ending", [".part", ".incomplete", ".aria2"])
def test_an_unfinished_download_is_no_missing_file(tmp_path: Path, ending: str) -> None:
    shards = write_shards(tmp_path)
    shards[1].rename(f"{shards[1]}{ending}")
    fault = only_fault(shards[0])
    assert fault.kind is FaultKind.MISSING
    assert f"number 2 is missing, and '{shards[1].name}{ending}' is an unfinished download" in fault.sentence
    assert fault.remedy == "finish the download"


def test_shards_joined_by_cat_are_told_from_a_model(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    parts = [shard.read_bytes() for shard in shards]
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(parts))
    fault = faults_of(joined)[0]
    assert (fault.kind, fault.byte) == (FaultKind.CONCATENATED, len(parts[0]))
    assert f"the first ends at byte {len(parts[0]):,}, where another begins" in fault.sentence
    assert "llama-gguf-split --merge" in fault.remedy
    shards[0].write_bytes(parts[0][:-16] + parts[1])  # the last padding lacks, as some writers leave it
    assert faults_of(shards[0])[0].byte == len(parts[0]) - 16


def test_a_shard_that_is_there_twice_is_no_swap(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    shutil.copy(shards[1], shards[2])
    fault = only_fault(shards[0])
    assert (fault.kind, fault.file) == (FaultKind.DUPLICATE_SHARD, shards[2])
    assert fault.sentence == (
        f"'{shards[2]}' is a second copy of shard 2 of 3, which '{shards[1].name}' is already, though its name says "
        f"shard 3 of 3; fetch shard 3 of 3 in its place"
    )


def test_swapped_shards_give_both_numbers(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 4)
    one, three = shards[0].read_bytes(), shards[2].read_bytes()
    shards[0].write_bytes(three)
    shards[2].write_bytes(one)
    found = faults_of(shards[0])
    assert [(fault.kind, fault.file) for fault in found[:2]] == [
        (FaultKind.SHARD_NUMBER, shards[0]),
        (FaultKind.SHARD_NUMBER, shards[2]),
    ]
    assert "is shard 3 of 4 by its own header, but shard 1 of 4 by its name" in found[0].sentence


def test_shards_of_two_quants_are_told_by_the_whole(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    Gguf(pairs=split_pairs(1, 3, 5), tensors=[Tensor("blk.1.w")]).write(shards[1])
    fault = only_fault(shards[0])
    assert (fault.kind, fault.file) == (FaultKind.MIXED_SETS, shards[1])
    assert "belongs to a set of 5 tensors, but 'big-00001-of-00003.gguf' to one of 3; they are of" in fault.sentence


def test_shards_of_two_quants_are_told_by_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    Gguf(pairs=split_pairs(1, 3, 3), tensors=[Tensor("blk.0.w")]).write(shards[1])
    fault = only_fault(shards[0])
    assert (fault.kind, fault.file) == (FaultKind.MIXED_SETS, shards[1])
    assert "holds the tensor blk.0.w, which 'big-00001-of-00003.gguf' holds already" in fault.sentence
    assert fault.byte is not None
    assert f"byte {fault.byte:,}" in fault.sentence


def test_a_damaged_header_keeps_its_sentence(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Gguf().data()[:40])
    fault = only_fault(path)
    assert fault.kind is FaultKind.DAMAGED_HEADER
    assert fault.remedy == "fetch the file again"


def punch(path: Path, start: int, n_bytes: int) -> None:
    """Give the file a hole, by writing it anew around it."""
    data = path.read_bytes()
    with open(path, "wb") as file:
        file.write(data[:start])
        file.seek(start + n_bytes)
        file.write(data[start + n_bytes :])


def test_a_hole_in_weights_is_found_without_reading(tmp_path: Path) -> None:
    path, start = write_big(tmp_path / "m.gguf")
    hole = -(-start // 4096) * 4096
    punch(path, hole, LEAST_BYTES)
    fault = only_fault(path)
    assert (fault.kind, fault.byte, fault.end) == (FaultKind.HOLE, hole, hole + LEAST_BYTES)
    assert f"bytes {hole:,} to {hole + LEAST_BYTES - 1:,}, in the tensor blk.0.big, were never written" in fault.cause


def test_several_holes_are_one_fault_with_their_sum(tmp_path: Path) -> None:
    path, start = write_big(tmp_path / "m.gguf")
    first = -(-start // 4096) * 4096
    with open(path, "r+b") as file:
        file.truncate(first)
        file.seek(first + LEAST_BYTES)
        file.write(b"\1" * 4096)
        file.truncate(start + 4 * N_VALUES)
    fault = only_fault(path)
    total = start + 4 * N_VALUES - first - 4096
    assert f"and with 1 more such places {total:,} bytes" in fault.cause
    assert fault.end == start + 4 * N_VALUES


def test_a_file_without_any_weights_is_a_shape_and_no_download(tmp_path: Path) -> None:
    path, start = write_big(tmp_path / "m.gguf")
    with open(path, "r+b") as file:
        file.truncate(start)
        file.truncate(start + 4 * N_VALUES)
    assert inspect_model(path).faults == ()
    (fault,) = inspect_model(path, shapes=False).faults
    assert fault.kind is FaultKind.HOLE


def test_rows_of_the_vocabulary_may_be_empty(tmp_path: Path) -> None:
    tokens = [("tokenizer.ggml.tokens", raw.ARRAY, Array(raw.STRING, ["t"] * N_VALUES))]
    path, start = write_big(tmp_path / "m.gguf", list(tokens))
    punch(path, -(-start // 4096) * 4096, LEAST_BYTES)
    assert inspect_model(path).faults == ()


def test_sizes_are_compared_with_what_was_fetched(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    records = tuple(FileRecord(shard.name, shard.stat().st_size) for shard in shards)
    write_manifest(tmp_path, FileSet("o/r", "rev", "Q4_K_M", records))
    assert inspect_model(shards[0]).faults == ()
    with open(shards[1], "ab") as file:
        file.write(b"x" * 64)
    fault = only_fault(shards[0])
    size = records[1].size_bytes
    assert (fault.kind, fault.byte) == (FaultKind.WRONG_SIZE, size)
    assert f"has {size + 64:,} bytes, but by o/r:Q4_K_M it should have {size:,}" in fault.cause
    assert fault.remedy == f"run: python -m server fetch o/r:Q4_K_M --to {tmp_path} --repair"


def test_a_damaged_manifest_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("{")
    assert resolve_model(tmp_path).first == shards[0]


def test_what_may_not_be_read_is_a_fault_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_shards(tmp_path)

    def refuse(file: Path) -> None:
        if file == shards[2]:
            raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("server.store.quick.what_it_is", refuse)
    fault = only_fault(shards[0])
    assert (fault.kind, fault.file) == (FaultKind.UNREADABLE, shards[2])
