"""The header reader: what it reads, what it refuses, and that no file makes it do anything else."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import ModelFileError
from server.gguf import ArrayRef, Header, ValueType, read_array, read_header, read_header_from
from tests.support import gguf_bytes as raw
from tests.support.gguf_bytes import Array, Gguf, Tensor
from tests.support.tiny_gguf import write_tiny_gguf


def failure(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    return caught.value.message


def test_every_scalar_type_is_read(tmp_path: Path) -> None:
    pairs: list[tuple[str, int, Any]] = [
        ("u8", raw.U8, 200),
        ("i8", raw.I8, -100),
        ("u16", raw.U16, 60_000),
        ("i16", raw.I16, -30_000),
        ("u32", raw.U32, 4_000_000_000),
        ("i32", raw.I32, -2_000_000_000),
        ("f32", raw.F32, 0.5),
        ("yes", raw.BOOL, 1),
        ("no", raw.BOOL, 0),
        ("text", raw.STRING, "größe 大"),
        ("u64", raw.U64, 2**63 + 1),
        ("i64", raw.I64, -(2**62)),
        ("f64", raw.F64, -1e300),
    ]
    header = read_header(Gguf(pairs=pairs).write(tmp_path / "m.gguf"))
    assert {key: header.metadata[key] for key, _, _ in pairs} == {
        key: bool(value) if type_ == raw.BOOL else value for key, type_, value in pairs
    }
    assert header.metadata["yes"] is True
    assert header.metadata["no"] is False


@pytest.mark.parametrize(
    ("type_", "items"),
    [
        (raw.STRING, ["a", "", "b c", "ü"]),
        (raw.I32, [1, -2, 3]),
        (raw.F32, [0.5, -1.5]),
        (raw.BOOL, [1, 0, 1]),
        (raw.U8, []),
    ],
)
def test_arrays_are_noted_and_read_on_demand(tmp_path: Path, type_: int, items: list[Any]) -> None:
    pairs = [("before", raw.U32, 7), ("list", raw.ARRAY, Array(type_, items)), ("after", raw.STRING, "x")]
    header = read_header(Gguf(pairs=pairs).write(tmp_path / "m.gguf"))
    ref = header.metadata["list"]
    assert isinstance(ref, ArrayRef)
    assert (ref.type, ref.count) == (ValueType(type_), len(items))
    assert header.metadata["after"] == "x"
    assert read_array(header, "list") == ([bool(item) for item in items] if type_ == raw.BOOL else items)
    with pytest.raises(KeyError):
        read_array(header, "before")
    with pytest.raises(KeyError):
        read_array(header, "nothing")


def test_arrays_longer_than_the_window_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gguf._WINDOW_BYTES", 64)
    texts = [f"token {i} " + "x" * (i % 150) for i in range(500)]
    pairs = [("list", raw.ARRAY, Array(raw.STRING, texts)), ("numbers", raw.ARRAY, Array(raw.U32, list(range(300))))]
    header = read_header(Gguf(pairs=pairs).write(tmp_path / "m.gguf"))
    assert read_array(header, "list") == texts
    assert read_array(header, "numbers") == list(range(300))


def test_it_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    header, other = read_header(path), reference.GGUFReader(path)
    assert header.data_offset == other.data_offset
    assert header.data_end == header.file_bytes == path.stat().st_size
    assert [(t.name, list(t.shape), t.type_id, t.n_bytes, header.data_offset + t.offset) for t in header.tensors] == [
        (t.name, [int(n) for n in t.shape], int(t.tensor_type), int(t.n_bytes), int(t.data_offset))
        for t in other.tensors
    ]
    fields = {key: field for key, field in other.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for key, value in header.metadata.items():
        mine = read_array(header, key) if isinstance(value, ArrayRef) else value
        assert mine == fields[key].contents(), key


def test_sizes_of_tensor_types_are_ggmls(tmp_path: Path) -> None:
    for type_, (n_block, n_bytes) in reference.GGML_QUANT_SIZES.items():
        if type_ is reference.GGMLQuantizationType.Q8_1:
            continue  # the package counts two floats of 4 bytes, ggml's block_q8_1 has two of 2
        tensor = Tensor("t", (n_block * 3, 2), int(type_), n_bytes=0)
        header = read_header(Gguf(tensors=[tensor]).write(tmp_path / "m.gguf"))
        assert header.tensors[0].n_bytes == 6 * n_bytes, type_
        assert header.tensors[0].type_name.lower() == type_.name.lower()


def test_a_tensor_type_from_the_future_is_let_through(tmp_path: Path) -> None:
    header = read_header(Gguf(tensors=[Tensor("t", (7,), type_id=999)]).write(tmp_path / "m.gguf"))
    assert header.tensors[0].n_bytes is None
    assert header.tensors[0].type_name == "type 999"
    assert header.data_end == header.data_offset


def test_alignment_is_the_files(tmp_path: Path) -> None:
    pairs = [("general.alignment", raw.U32, 256)]
    header = read_header(Gguf(pairs=pairs, alignment=256).write(tmp_path / "m.gguf"))
    assert header.alignment == 256
    assert header.data_offset % 256 == 0


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw.text("k") + struct.pack("<I", raw.STRING) + raw.text(b"a\xffb")
    )
    assert read_header(path).metadata == {"k": "a\ufffdb"}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (Gguf(magic=b"GGUX"), "does not start with the letters GGUF"),
        (Gguf(version=1), "version 1"),
        (Gguf(version=4), "version 4"),
        (Gguf(version=3 << 24), "big-endian"),
        (Gguf(n_tensors=2**60), "claims 1,152,921,504,606,846,976 tensors"),
        (Gguf(n_pairs=2**60), "metadata values"),
        (Gguf(pairs=[("k", raw.U8, 1), ("k", raw.U8, 2)]), "'k' appears twice"),
        (Gguf(tensors=[Tensor("t"), Tensor("t")]), "'t' appears twice"),
        (Gguf(tensors=[Tensor("t", (1, 1, 1, 1, 1))]), "5 dimensions"),
        (Gguf(tensors=[Tensor("t", (33,), 2)]), "not a multiple of 32"),
        (Gguf(pairs=[("general.alignment", raw.U32, 24)]), "power of two"),
        (Gguf(pairs=[("general.alignment", raw.STRING, "32")]), "power of two"),
        (Gguf(pairs=[("k", raw.ARRAY, Array(raw.ARRAY, []))]), "array of arrays"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, file: Gguf, words: str) -> None:
    path = file.write(tmp_path / "m.gguf")
    message = failure(path)
    assert words in message
    assert str(path) in message


@pytest.mark.parametrize(
    "content", [b"", b"G", b"GGU", b"GGUF", b"GGUF\x03\x00\x00", b"GGUF\x03\x00\x00\x00" + bytes(15)]
)
def test_short_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert "GGUF" in failure(path)


def test_unknown_value_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw.text("k") + struct.pack("<IQ", 13, 0))
    assert "'k' has the unknown value type 13" in failure(path)


@pytest.mark.parametrize("type_", [raw.STRING, raw.ARRAY])
@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
def test_lengths_beyond_the_file_allocate_nothing(tmp_path: Path, type_: int, length: int) -> None:
    path = tmp_path / "m.gguf"
    value = struct.pack("<Q", length) if type_ == raw.STRING else struct.pack("<IQ", raw.U32, length)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw.text("k") + struct.pack("<I", type_) + value)
    tracemalloc.start()
    try:
        assert "the file ends at" in failure(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_missing_files_and_folders_are_model_file_errors(tmp_path: Path) -> None:
    assert "No such file" in failure(tmp_path / "absent.gguf")
    assert "Is a directory" in failure(tmp_path)
    header = read_header(Gguf(pairs=[("a", raw.ARRAY, Array(raw.U8, [1]))]).write(tmp_path / "m.gguf"))
    Path(header.path).unlink()
    with pytest.raises(ModelFileError, match="No such file"):
        read_array(header, "a")


def test_a_file_that_shrank_is_a_model_file_error(tmp_path: Path) -> None:
    texts = ["x" * 100] * 1000
    header = read_header(Gguf(pairs=[("a", raw.ARRAY, Array(raw.STRING, texts))]).write(tmp_path / "m.gguf"))
    Path(header.path).write_bytes(b"short")
    with pytest.raises(ModelFileError):
        read_array(header, "a")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    pairs = [
        ("general.architecture", raw.STRING, "llama"),
        ("general.alignment", raw.U32, 32),
        ("tokens", raw.ARRAY, Array(raw.STRING, ["a", "bb", "ccc", "", "dddd"])),
        ("scores", raw.ARRAY, Array(raw.F32, [0.5, 1.5, -2.0])),
        ("flag", raw.BOOL, 1),
        ("u64", raw.U64, 5),
    ]
    return Gguf(pairs=pairs, tensors=[Tensor("a", (32, 2), 8), Tensor("b", (4, 4, 2))]).data()


def read_all(path: Path) -> Header:
    """Everything a caller can ask of a header."""
    header = read_header(path)
    assert header.data_end >= 0
    for key, value in header.metadata.items():
        if isinstance(value, ArrayRef):
            read_array(header, key)
    for tensor in header.tensors:
        assert tensor.n_bytes is None or tensor.n_bytes >= 0
        assert tensor.type_name
    return header


def read_or_refused(path: Path) -> None:
    """Read everything; whatever else than a ModelFileError that names the file is raised goes through."""
    try:
        read_all(path)
    except ModelFileError as refusal:
        message = refusal.message
    else:
        return
    assert str(path) in message


MUTATE = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MUTATE
@given(data=st.data())
def test_mutated_headers_are_read_or_refused(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=9))
        content[at : at + len(new)] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_or_refused(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@MUTATE
@given(content=st.binary(max_size=300))
def test_any_bytes_behind_the_magic_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + content)
    read_or_refused(path)


def test_every_truncation_of_the_header_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    data_offset = read_all(path).data_offset
    for length in range(data_offset - 31):
        path.write_bytes(whole[:length])
        failure(path)


def test_a_large_vocabulary_is_stepped_over_quickly(tmp_path: Path) -> None:
    n_tokens, n_merges = 151_936, 320_000
    pairs = [
        ("general.architecture", raw.STRING, "glm"),
        ("tokenizer.ggml.tokens", raw.ARRAY, Array(raw.STRING, [f"token{i}" for i in range(n_tokens)])),
        ("tokenizer.ggml.merges", raw.ARRAY, Array(raw.STRING, [f"to ken{i}" for i in range(n_merges)])),
        ("tokenizer.ggml.token_type", raw.ARRAY, Array(raw.I32, [1] * n_tokens)),
    ]
    path = Gguf(pairs=pairs).write(tmp_path / "m.gguf")
    header, times = read_header(path), []
    for _ in range(3):
        start = time.perf_counter()
        read_header(path)
        times.append(time.perf_counter() - start)
    ref = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(ref, ArrayRef)
    assert ref.count == n_tokens
    assert min(times) < 0.3
    assert read_array(header, "tokenizer.ggml.tokens")[-1] == f"token{n_tokens - 1}"


class Ranges:
    """A file that is somewhere else: it counts what is asked for."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.asked: list[tuple[int, int]] = []

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (len(self._data) if whence == 2 else 0)
        return self._at

    def read(self, size: int) -> bytes:
        self.asked.append((self._at, size))
        return self._data[self._at : self._at + size]


def test_a_remote_header_costs_little_and_no_byte_twice(tmp_path: Path) -> None:
    texts = [f"token {i} " + "x" * (i % 50) for i in range(40_000)]
    pairs = [("tokens", raw.ARRAY, Array(raw.STRING, texts)), ("layers", raw.ARRAY, Array(raw.I32, [1, 0, 7]))]
    data = Gguf(pairs=pairs, tensors=[Tensor("w", n_bytes=1 << 24)]).data()
    source = Ranges(data)
    header = read_header_from(source, "far.gguf")
    assert header.numbers == {"layers": (1, 0, 7)}
    assert [tensor.name for tensor in header.tensors] == ["w"]
    spans = sorted(source.asked)
    assert all(start + size <= next_start for (start, size), (next_start, _) in itertools.pairwise(spans))
    assert sum(size for _, size in source.asked) < 2 * header.data_offset < len(data) // 2
    small = Ranges(Gguf(tensors=[Tensor("w", n_bytes=1 << 24)]).data())
    read_header_from(small, "shard.gguf")
    assert small.asked == [(0, 64 << 10)]
