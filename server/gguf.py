"""Reader of a GGUF file's header: metadata and tensor directory, never the tensor data. Pure Python, no dependencies.

Layout (GGUF 2 and 3, little endian): magic "GGUF", u32 version, u64 number of tensors, u64 number of key/value pairs;
the pairs (string key, u32 type, value); the tensors (string name, u32 number of dimensions, u64 each, u32 type, u64
offset); then, at the next multiple of `general.alignment`, the tensor data. A string is a u64 byte count and UTF-8.

Long arrays are not loaded (a vocabulary has some hundred thousand strings): the header keeps where they lie, and
`read_array` fetches one when it is wanted; short arrays of numbers (a value for each layer) are kept. Every count and
length is checked against the file's size before anything is allocated, so that a damaged file costs an error and not
the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from server.errors import ModelFileError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_WINDOW_BYTES = 4 << 20
_FIRST_WINDOW_BYTES = 64 << 10  # doubles with every read; a shard without the vocabulary needs no more
_KEPT_NUMBERS = 1 << 10  # llama.cpp reads no more than 512 layers
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_KEY_BYTES = 1 << 16
_MAX_TEXT_BYTES = 64 << 20


class ValueType(IntEnum):
    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_FORMATS: dict[ValueType, str] = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "B",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}

# ggml's tensor types: name, values in a block, bytes of a block (ggml.h, ggml-common.h). The gaps are withdrawn types.
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """An array in the file: `count` values of `type`, the first at byte `offset`. See `read_array`."""

    type: ValueType
    count: int
    offset: int


Value = int | float | bool | str | ArrayRef


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is in ggml's order, the contiguous dimension first. `offset` counts bytes from Header.data_offset."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def type_name(self) -> str:
        known = _TENSOR_TYPES.get(self.type_id)
        return known[0] if known else f"type {self.type_id}"

    @property
    def n_values(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def n_bytes(self) -> int | None:
        """Size of the data; None for a type that this reader does not know."""
        known = _TENSOR_TYPES.get(self.type_id)
        return self.n_values // known[1] * known[2] if known else None


class Source(Protocol):
    """What a header can be read from: an open file, or something that fetches ranges of a remote one."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Header:
    path: str
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int  # byte at which tensor data starts
    file_bytes: int
    numbers: Mapping[str, tuple[int | float | bool, ...]] = field(default_factory=dict)  # short arrays, already read

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def architecture(self) -> str | None:
        return self.text("general.architecture")

    @property
    def data_end(self) -> int:
        """The least size in bytes that a file with these tensors can have."""
        ends = (self.data_offset + tensor.offset + (tensor.n_bytes or 0) for tensor in self.tensors)
        return max(ends, default=self.data_offset if self.tensors else 0)


def read_header(path: str | Path) -> Header:
    """Read metadata and tensor directory of a GGUF file. Raises ModelFileError, also when the file cannot be opened."""
    try:
        with open(path, "rb") as file:
            return _read(_Reader(file, str(path)))
    except OSError as error:
        raise ModelFileError(f"cannot read '{path}': {error.strerror or error}") from None


def read_header_from(source: Source, name: str) -> Header:
    """As read_header, from anything that can seek (from its end too) and read, such as a file on another machine. Asks
    for 64 KiB first and twice as much each time it needs more, up to 4 MiB, and for no byte twice."""
    return _read(_Reader(source, name))


def read_array(header: Header, key: str) -> list[int] | list[float] | list[bool] | list[str]:
    """Load one array of the metadata. Raises KeyError where there is none of that name, else as read_header does."""
    ref = header.metadata[key]
    if not isinstance(ref, ArrayRef):
        raise KeyError(f"{key} is not an array")
    try:
        with open(header.path, "rb") as file:
            reader = _Reader(file, header.path)
            reader.at = ref.offset
            return reader.array(ref, key)
    except OSError as error:
        raise ModelFileError(f"cannot read '{header.path}': {error.strerror or error}") from None


class _Reader:
    """A forward cursor over a file that holds one window of it in memory."""

    def __init__(self, file: Source, path: str) -> None:
        self.file = file
        self.path = path
        self.size = file.seek(0, 2)
        self.at = 0
        self.window = b""
        self.base = 0  # file offset of the window's first byte
        self.ahead = _FIRST_WINDOW_BYTES
        self.numbers: dict[str, tuple[int | float | bool, ...]] = {}

    def fail(self, why: str) -> ModelFileError:
        return ModelFileError(f"'{self.path}' is not a whole GGUF file: {why}; fetch the file again")

    def check_room(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.at:
            raise self.fail(f"{what} at byte {self.at:,} is {n_bytes:,} bytes long, but the file ends at {self.size:,}")

    def hold(self, n_bytes: int, what: str) -> int:
        """Have the next bytes in the window; returns their index there."""
        index = self.at - self.base
        if index < 0 or index + n_bytes > len(self.window):
            self.check_room(n_bytes, what)
            kept = self.window[index:] if 0 <= index < len(self.window) else b""
            start = self.at + len(kept)
            self.ahead = min(self.ahead, _WINDOW_BYTES)
            self.file.seek(start)
            self.window = kept + self.file.read(min(max(n_bytes - len(kept), self.ahead), self.size - start))
            self.ahead *= 2
            self.base = self.at
            index = 0
            if len(self.window) < n_bytes:
                raise self.fail(f"it became shorter while {what} was read")
        return index

    def number(self, type_: ValueType, what: str) -> int:
        return int(self.scalar(type_, what))

    def scalar(self, type_: ValueType, what: str) -> int | float | bool:
        packer = struct.Struct("<" + _FORMATS[type_])
        index = self.hold(packer.size, what)
        (value,) = packer.unpack_from(self.window, index)
        self.at += packer.size
        return bool(value) if type_ is ValueType.BOOL else value

    def text(self, what: str, limit: int) -> str:
        length = self.number(ValueType.U64, what)
        self.check_room(length, what)
        if length > limit:
            raise self.fail(f"{what} claims {length:,} bytes, more than the {limit:,} that such a text may have")
        index = self.hold(length, what)
        self.at += length
        return self.window[index : index + length].decode("utf-8", errors="replace")

    def value_type(self, what: str) -> ValueType:
        number = self.number(ValueType.U32, what)
        try:
            return ValueType(number)
        except ValueError:
            raise self.fail(f"{what} has the unknown value type {number}") from None

    def array_ref(self, key: str, what: str) -> ArrayRef:
        """Note an array, keep it if it is a short one of numbers, and step over it."""
        type_ = self.value_type(what)
        if type_ is ValueType.ARRAY:
            raise self.fail(f"{what} is an array of arrays, which llama.cpp does not read")
        count = self.number(ValueType.U64, what)
        ref = ArrayRef(type_, count, self.at)
        if type_ is ValueType.STRING:
            self.check_room(count * 8, what)
            self.step_over_texts(count, what)
        else:
            n_bytes = count * struct.calcsize("<" + _FORMATS[type_])
            self.check_room(n_bytes, what)
            if count <= _KEPT_NUMBERS:
                self.numbers[key] = tuple(self.values(ref, what))
            else:
                self.at += n_bytes
        return ref

    def step_over_texts(self, count: int, what: str) -> None:
        # The hot loop of this module: 150,000 strings and more. Local names, one bound check per string.
        unpack = struct.Struct("<Q").unpack_from
        size = self.size
        at, base, window = self.at, self.base, self.window
        end = base + len(window) - 8
        for _ in range(count):
            if not base <= at <= end:
                self.at = at
                self.hold(8, what)
                base, window = self.base, self.window
                end = base + len(window) - 8
            at += 8 + unpack(window, at - base)[0]
            if at > size:
                raise self.fail(f"a text of {what} reaches to byte {at:,}, but the file ends at {size:,}")
        self.at = at

    def texts(self, count: int, what: str) -> list[str]:
        self.check_room(count * 8, what)
        unpack = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        at, base, window = self.at, self.base, self.window
        for _ in range(count):
            index = at - base
            if index < 0 or index + 8 > len(window) or index + 8 + unpack(window, index)[0] > len(window):
                self.at = at
                texts.append(self.text(what, _MAX_TEXT_BYTES))
                at, base, window = self.at, self.base, self.window
                continue
            start = index + 8
            at += 8 + unpack(window, index)[0]
            texts.append(window[start : at - base].decode("utf-8", "replace"))
        self.at = at
        return texts

    def array(self, ref: ArrayRef, what: str) -> list[int] | list[float] | list[bool] | list[str]:
        return self.texts(ref.count, what) if ref.type is ValueType.STRING else self.values(ref, what)

    def values(self, ref: ArrayRef, what: str) -> list[int] | list[float] | list[bool]:
        packer = struct.Struct(f"<{ref.count}{_FORMATS[ref.type]}")
        self.check_room(packer.size, what)
        index = self.hold(packer.size, what)
        values = list(packer.unpack_from(self.window, index))
        self.at += packer.size
        return [bool(value) for value in values] if ref.type is ValueType.BOOL else values


def _read(reader: _Reader) -> Header:
    version, n_tensors, n_pairs = _read_start(reader)
    metadata: dict[str, Value] = {}
    for number in range(n_pairs):
        key = reader.text(f"the name of metadata value {number}", _MAX_KEY_BYTES)
        if key in metadata:
            raise reader.fail(f"the metadata value '{key}' appears twice")
        what = f"the metadata value '{key}'"
        type_ = reader.value_type(what)
        if type_ is ValueType.ARRAY:
            metadata[key] = reader.array_ref(key, what)
        elif type_ is ValueType.STRING:
            metadata[key] = reader.text(what, _MAX_TEXT_BYTES)
        else:
            metadata[key] = reader.scalar(type_, what)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {alignment!r}, but it must be a power of two")
    tensors = _read_tensors(reader, n_tensors)
    data_offset = (reader.at + alignment - 1) // alignment * alignment
    return Header(reader.path, version, metadata, tensors, alignment, data_offset, reader.size, reader.numbers)


def _read_start(reader: _Reader) -> tuple[int, int, int]:
    """Magic, version and counts; returns version, number of tensors, number of pairs."""
    start = min(len(MAGIC), reader.size)
    reader.hold(start, "the magic")
    if reader.window[:start] != MAGIC:
        raise ModelFileError(f"'{reader.path}' is not a GGUF file: it does not start with the letters GGUF")
    reader.at = len(MAGIC)
    version = reader.number(ValueType.U32, "the version")
    if version & 0xFFFF == 0 and version:
        raise ModelFileError(
            f"'{reader.path}' is a big-endian GGUF file, which llama.cpp cannot read here; fetch a little-endian one"
        )
    if version not in (2, 3):
        raise ModelFileError(
            f"'{reader.path}' is a GGUF file of version {version}, but only 2 and 3 can be read; convert it again"
        )
    n_tensors = reader.number(ValueType.U64, "the number of tensors")
    n_pairs = reader.number(ValueType.U64, "the number of metadata values")
    for count, limit, least_bytes, what in (
        (n_tensors, _MAX_TENSORS, 24, "tensors"),
        (n_pairs, _MAX_PAIRS, 13, "metadata values"),
    ):
        if count > limit or count * least_bytes > reader.size:
            raise reader.fail(f"it claims {count:,} {what}, which a file of {reader.size:,} bytes cannot hold")
    return version, n_tensors, n_pairs


def _read_tensors(reader: _Reader, count: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    for number in range(count):
        name = reader.text(f"the name of tensor {number}", _MAX_KEY_BYTES)
        what = f"the entry of tensor '{name}'"
        if name in names:
            raise reader.fail(f"the tensor '{name}' appears twice")
        names.add(name)
        n_dimensions = reader.number(ValueType.U32, what)
        if n_dimensions > MAX_DIMENSIONS:
            raise reader.fail(f"the tensor '{name}' claims {n_dimensions:,} dimensions, more than {MAX_DIMENSIONS}")
        shape = tuple(reader.number(ValueType.U64, what) for _ in range(n_dimensions))
        type_id = reader.number(ValueType.U32, what)
        tensor = TensorInfo(name, shape, type_id, reader.number(ValueType.U64, what))
        known = _TENSOR_TYPES.get(type_id)
        if known and shape and shape[0] % known[1]:
            raise reader.fail(f"rows of the tensor '{name}' have {shape[0]:,} values, not a multiple of {known[1]}")
        tensors.append(tensor)
    return tuple(tensors)
