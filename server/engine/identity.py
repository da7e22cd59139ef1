"""Whose states these are: what stands for the model's files, and for the settings that shape its cache.

Hashing 400 GiB at every start is out of the question. Of each shard the size, the whole header (metadata and the
directory of tensors), the first and the last MiB of the weights and 64 KiB at 16 places between count. Two models that
agree in all of that are taken for one.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from server.engine.messages import ModelFacts
from server.engine.options import ModelOptions
from server.gguf import Header, read_header

_EDGE_BYTES = 1 << 20
_SAMPLE_BYTES = 64 << 10
_N_SAMPLES = 16
_DIGEST_BYTES = 16
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Identity:
    """16 bytes each."""

    model: bytes
    settings: bytes

    @property
    def name(self) -> str:
        """For a folder."""
        return f"{self.model.hex()[:16]}-{self.settings.hex()[:16]}"

    def difference(self, other: Identity) -> str | None:
        """Why a state of `other` cannot be used here. None: it can."""
        if other.model != self.model:
            return "it is of another model"
        if other.settings != self.settings:
            return (
                "it is of this model, but of other settings (--cache-type-k, --cache-type-v, --flash-attn, "
                "--kv-unified, those of RoPE, a context beyond training) or of another llama.cpp; start the server as "
                "it was then, or save it anew"
            )
        return None


def identity_of(options: ModelOptions, facts: ModelFacts) -> Identity:
    """Raises OSError and ModelFileError."""
    header = read_header(options.path)
    return Identity(_model_digest(options.path), _settings_digest(options, facts, header))


def _settings_digest(options: ModelOptions, facts: ModelFacts, header: Header) -> bytes:
    key = f"{header.architecture}.rope.scaling.original_context_length"
    trained = header.integer(key) or facts.n_ctx_train
    shown = (
        facts.build_info,
        facts.cache_type_k,
        facts.cache_type_v,
        options.flash_attn,
        facts.kv_unified,
        facts.can_cut,
        options.rope_scaling,
        options.rope_freq_base,
        options.rope_freq_scale,
        facts.n_ctx_seq > trained,  # some models take other frequencies then
    )
    return hashlib.sha256(repr(shown).encode()).digest()[:_DIGEST_BYTES]


def _model_digest(first: str) -> bytes:
    sha256 = hashlib.sha256()
    for shard in _shards(Path(first)):
        with open(shard, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = read_header(shard).data_offset
            sha256.update(b"%d %d\n" % (size, head))
            for start, end in _places(head, size):
                sha256.update(os.pread(file.fileno(), end - start, start))
    return sha256.digest()[:_DIGEST_BYTES]


def _places(head: int, size: int) -> list[tuple[int, int]]:
    edge = min(head + _EDGE_BYTES, size)
    places = [(0, edge), (max(0, size - _EDGE_BYTES), size)]
    step = (size - edge) // (_N_SAMPLES + 1)
    if step > _SAMPLE_BYTES:
        places += [(edge + i * step, edge + i * step + _SAMPLE_BYTES) for i in range(1, _N_SAMPLES + 1)]
    return places


def _shards(first: Path) -> list[Path]:
    """By name, as llama.cpp finds them."""
    match = _SHARD.fullmatch(first.name)
    if match is None:
        return [first]
    count = match["count"]
    return [first.with_name(f"{match['stem']}-{i:05d}-of-{count}{first.suffix}") for i in range(1, int(count) + 1)]
