"""Metadata of one architecture with llama.cpp's defaults (llama_model_base::load_hparams in src/llama-model.cpp)."""

from __future__ import annotations

from server.errors import ModelFileError
from server.gguf import Header

_MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS


class Metadata:
    """`header` is the first shard's. Keys are given without the architecture in front."""

    def __init__(self, header: Header) -> None:
        architecture = header.architecture
        if architecture is None:
            raise ModelFileError(f"'{header.path}' does not name its architecture; fetch the model again")
        self.architecture = architecture
        self._header = header
        self.n_blocks = self.integer("block_count")
        if not 1 <= self.n_blocks <= _MAX_BLOCKS:
            raise ModelFileError(
                f"'{header.path}' has {self.n_blocks} blocks ({architecture}.block_count), but llama.cpp loads models "
                f"of 1 to {_MAX_BLOCKS}; fetch the model again"
            )
        self.n_nextn = min(self.integer("nextn_predict_layers"), self.n_blocks)
        heads = self.per_block("attention.head_count")
        self.n_head_kv = self.per_block("attention.head_count_kv", heads)
        first = heads[0]
        even = self.integer("embedding_length") // first if first else 0
        self.head_k = self.integer("attention.key_length", even) if first else 0
        self.head_v = self.integer("attention.value_length", even) if first else 0
        self.window = self.integer("attention.sliding_window")

    def integer(self, key: str, default: int = 0) -> int:
        value = self._header.integer(f"{self.architecture}.{key}")
        return default if value is None else value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._header.metadata

    def array(self, key: str) -> tuple[int, ...] | None:
        """A value for each block, if the metadata has it as an array."""
        values = self._header.numbers.get(f"{self.architecture}.{key}")
        return None if values is None else tuple(int(value) for value in values)

    def per_block(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A value for each block: an array, one number for all, or the default (else zeros)."""
        values = self.array(key)
        if values is not None:
            return (values + (0,) * self.n_blocks)[: self.n_blocks]
        if self.has(key) or default is None:
            return (self.integer(key),) * self.n_blocks
        return default
