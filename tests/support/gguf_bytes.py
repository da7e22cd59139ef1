"""Writes GGUF files byte by byte, right or wrong. Not with the gguf package: tests of a reader need another writer."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
TYPE_F32 = 0


@dataclass
class Array:
    type: int
    items: list[Any]


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...] = (4,)
    type_id: int = TYPE_F32
    offset: int | None = None  # None: behind the one before
    n_bytes: int = 16


@dataclass
class Gguf:
    """`pairs` are (key, type, value); call `write` or `data`."""

    pairs: list[tuple[str, int, Any]] = field(default_factory=lambda: [("general.architecture", STRING, "llama")])
    tensors: list[Tensor] = field(default_factory=lambda: [Tensor("token_embd.weight")])
    version: int = 3
    alignment: int = 32
    magic: bytes = b"GGUF"
    n_tensors: int | None = None
    n_pairs: int | None = None

    def data(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_pairs)
        for key, type_, value in self.pairs:
            head += text(key) + struct.pack("<I", type_) + encoded(type_, value)
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            head += text(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type_id, offset)
            at = padded(offset + tensor.n_bytes, self.alignment)
        return head + bytes(padded(len(head), self.alignment) - len(head)) + bytes(at)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data())
        return path


def padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def encoded(type_: int, value: Any) -> bytes:
    if type_ == STRING:
        return text(value)
    if type_ == ARRAY:
        items = b"".join(encoded(value.type, item) for item in value.items)
        return struct.pack("<IQ", value.type, len(value.items)) + items
    return struct.pack("<" + FORMATS[type_], value)


def split_pairs(index: int, count: int, n_tensors: int) -> list[tuple[str, int, Any]]:
    """The metadata of shard `index` (from 0) of `count`."""
    return [
        ("general.architecture", STRING, "llama"),
        ("split.no", U16, index),
        ("split.count", U16, count),
        ("split.tensors.count", I32, n_tensors),
    ]


def write_shards(folder: Path, count: int = 3, stem: str = "big") -> list[Path]:
    return [
        Gguf(pairs=split_pairs(index, count, count), tensors=[Tensor(f"blk.{index}.w")]).write(
            folder / f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"
        )
        for index in range(count)
    ]
