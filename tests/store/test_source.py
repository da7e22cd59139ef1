"""What a model path means, and that everything wrong with it is one sentence that names the file and the way out."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from server.errors import ModelFileError
from server.store.source import demo_model, resolve_model
from tests.support import gguf_bytes as raw
from tests.support.gguf_bytes import Gguf, Tensor, split_pairs, write_shards


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelFileError) as caught:
        resolve_model(path)
    message = caught.value.message
    assert "\n" not in message
    return message


def test_a_file_is_itself(tmp_path: Path) -> None:
    path = Gguf().write(tmp_path / "GLM-5.2.Q4_K_M.gguf")
    files = resolve_model(str(path))
    assert files.first == path
    assert files.shards == (path,)
    assert files.name == "GLM-5.2.Q4_K_M"
    assert files.n_bytes == path.stat().st_size
    assert files.header.architecture == "llama"


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = Gguf().write(tmp_path / "m.gguf")
    assert resolve_model("~/m.gguf").first == path
    assert "no usable path" in refusal("~no-such-user-here/m.gguf")


def test_any_shard_stands_for_the_set(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 12)
    for shard in (shards[0], shards[5], shards[11]):
        files = resolve_model(shard)
        assert files.first == shards[0]
        assert files.shards == tuple(shards)
        assert files.name == "big"
        assert [header.integer("split.no") for header in files.headers] == list(range(12))


def test_a_pattern_stands_for_the_one_model_that_it_matches(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    assert resolve_model(tmp_path / "*.gguf").shards == tuple(shards)
    assert resolve_model(f"{tmp_path}/big-0000?-of-*").first == shards[0]
    assert "no .gguf file matches" in refusal(tmp_path / "*.bin")
    Gguf().write(tmp_path / "other.gguf")
    assert f"matches 2 models; give the path of one: '{shards[0]}', '{tmp_path / 'other.gguf'}'" in refusal(
        tmp_path / "*.gguf"
    )
    odd = Gguf().write(tmp_path / "m[1].gguf")
    assert resolve_model(odd).first == odd


def test_a_single_shard_is_a_set(tmp_path: Path) -> None:
    path = Gguf().write(tmp_path / "m-00001-of-00001.gguf")
    assert resolve_model(path).name == "m"


def test_a_folder_stands_for_the_one_model_in_it(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    Gguf().write(tmp_path / "mmproj-F16.gguf")
    Gguf().write(tmp_path / "imatrix.gguf")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "not-a-file.gguf").mkdir()
    assert resolve_model(tmp_path).first == shards[0]


def test_a_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    write_shards(tmp_path)
    for i in range(9):
        Gguf().write(tmp_path / f"other{i}.gguf")
    message = refusal(tmp_path)
    assert "holds 10 models" in message
    assert "'big-00001-of-00003.gguf', 'other0.gguf'" in message
    assert message.endswith("and 2 more")


def test_a_folder_without_a_model_says_where_one_is(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("give the path of a .gguf file")
    below = tmp_path / "Q4_K_M"
    below.mkdir()
    write_shards(below)
    assert f"there is one in '{below}'" in refusal(tmp_path)


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path) -> None:
    path = Gguf().write(tmp_path / "glm-5.2-q4.gguf")
    assert f"did you mean '{path}'?" in refusal(tmp_path / "glm-5.2-q5.gguf")
    assert "check the path" in refusal(tmp_path / "zzz")
    assert f"nor its folder '{tmp_path / 'nowhere'}'" in refusal(tmp_path / "nowhere" / "m.gguf")


def test_a_dangling_link_says_what_it_points_to(tmp_path: Path) -> None:
    link = tmp_path / "m.gguf"
    link.symlink_to(tmp_path / "blobs" / "abc")
    assert f"a link to '{tmp_path / 'blobs' / 'abc'}'" in refusal(link)


def test_a_link_to_a_model_keeps_its_name(tmp_path: Path) -> None:
    """The hub's cache: names are links to blobs, and shards are found by the links' names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, shard in enumerate(write_shards(tmp_path, 2)):
        shard.rename(blobs / f"blob{i}")
        (snapshot / shard.name).symlink_to(blobs / f"blob{i}")
    files = resolve_model(snapshot)
    assert files.first == snapshot / "big-00001-of-00002.gguf"
    assert len(files.shards) == 2


def test_a_device_is_no_model() -> None:
    assert "neither a file nor a folder" in refusal("/dev/null")


def test_a_zero_byte_in_the_path_is_no_crash() -> None:
    refusal("/tmp/a\0b")


def test_a_file_that_may_not_be_read_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Gguf().write(tmp_path / "m.gguf")

    def refuse(file: Path) -> str | None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("server.store.quick.what_it_is", refuse)
    message = refusal(path)
    assert f"cannot read '{path}': Permission denied" in message
    assert "right to read" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>Sign in</html>", "a web page"),
        (b"\n\n  <html><body>", "a web page"),
        (b"PK\x03\x04rest", "zip"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (struct.pack("<Q", 64) + b'{"a.weight":{"dtype":"F32"}}', "safetensors"),
        (b'{"error":"not found"}', "JSON"),
        (bytes(4096), "zeros"),
        (b"tjgg\x03\x00\x00\x00", "GGJT"),
        (b"FUGG", "big-endian"),
        (b"\x80\x02\x8a\nl\xfc", "PyTorch"),
        (b"hello world", "b'hello wo'"),
    ],
)
def test_what_is_no_gguf_is_called_by_its_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert words in message
    assert message.startswith(f"'{path}' is ")


def test_a_cut_file_names_both_sizes(tmp_path: Path) -> None:
    path = Gguf(tensors=[Tensor("t", (1000,), n_bytes=4000)]).write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    end = len(whole)  # 4,000 is a multiple of the alignment
    path.write_bytes(whole[: end - 1])
    message = refusal(path)
    assert f"{end:,}" in message
    assert f"{end - 1:,}" in message
    assert "99 %" in message
    path.write_bytes(whole[:40])
    assert "not a whole GGUF file" in refusal(path)


def test_padding_behind_the_last_tensor_may_be_missing(tmp_path: Path) -> None:
    path = Gguf(tensors=[Tensor("t", (1,), n_bytes=4)]).write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-28])
    assert resolve_model(path).first == path


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ([2], "number 2 is missing"),
        ([1, 2, 3, 5], "numbers 1 to 3 and 5 are missing"),
        ([1, 3, 4, 9], "numbers 1, 3 to 4 and 9 are missing"),
    ],
)
def test_missing_shards_are_counted_off(tmp_path: Path, gone: list[int], words: str) -> None:
    shards = write_shards(tmp_path, 9)
    for number in gone:
        shards[number - 1].unlink()
    message = refusal(shards[7])
    assert "of the 9 shards of 'big'" in message
    assert words in message


def test_a_cut_shard_is_found(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    shards[2].write_bytes(shards[2].read_bytes()[:-20])
    assert refusal(shards[0]).startswith(f"'{shards[2]}' is cut short")


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf"])
def test_impossible_shard_numbers_are_refused(tmp_path: Path, name: str) -> None:
    assert "numbered from 1" in refusal(Gguf().write(tmp_path / name))


def test_names_and_headers_of_shards_must_agree(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    message = refusal(shards[0])
    assert "is shard 2 of 3 by its own header, but shard 1 of 3 by its name" in message


def test_a_renamed_shard_is_not_loaded_alone(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    renamed = shards[0].rename(tmp_path / "model.gguf")
    assert "is shard 1 of 3 by its own header, but a whole model by its name" in refusal(renamed)


def test_a_whole_model_named_like_a_shard_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        Gguf().write(tmp_path / f"m-0000{number}-of-00002.gguf")
    assert "a whole model by its own header, but shard 1 of 2" in refusal(tmp_path)


def test_shards_of_different_sets_are_refused(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 2)
    Gguf(pairs=split_pairs(1, 2, 2), tensors=[Tensor("x"), Tensor("y")]).write(shards[1])
    message = refusal(tmp_path)
    assert "hold 3 tensors, but the set should hold 2" in message


@pytest.mark.parametrize(
    ("pairs", "tensors", "words"),
    [
        ([("general.architecture", raw.STRING, "clip")], [Tensor("t")], "image projector"),
        ([("general.type", raw.STRING, "adapter")], [Tensor("t")], "type 'adapter'"),
        ([("other", raw.STRING, "x")], [Tensor("t")], "does not name its architecture"),
        ([("general.architecture", raw.STRING, "llama")], [], "no tensors"),
    ],
)
def test_other_things_in_gguf_files_are_refused(
    tmp_path: Path, pairs: list[tuple[str, int, object]], tensors: list[Tensor], words: str
) -> None:
    path = Gguf(pairs=pairs, tensors=tensors).write(tmp_path / "m.gguf")
    assert words in refusal(path)


def test_a_first_shard_without_tensors_is_fine(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 2)
    Gguf(pairs=split_pairs(0, 2, 1), tensors=[]).write(shards[0])
    Gguf(pairs=split_pairs(1, 2, 1)).write(shards[1])
    assert resolve_model(tmp_path).first == shards[0]


def test_the_demo_model_is_found_and_whole() -> None:
    files = resolve_model(demo_model())
    assert files.header.architecture == "llama"
    assert files.name.startswith("SmolLM2")


def test_a_missing_demo_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.store.source.DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelFileError, match="make install"):
        demo_model()
