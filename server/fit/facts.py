"""What a model is made of, from the headers of its shards alone: bytes of tensors block by block, and what every block
keeps of the tokens it has seen. `read_shape` is the entry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from server.errors import ModelFileError
from server.fit.attention import Kept, kept_of_blocks, window_tokens
from server.fit.metadata import Metadata
from server.gguf import Header, TensorInfo

# what --cpu-moe and --n-cpu-moe move (server/engine/native_params.py has the same pattern)
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


class Kind(Enum):
    """What a tensor of a block is for."""

    ATTENTION = "attention"
    DENSE = "dense"  # feed-forward that every token uses: dense layers, shared experts, the router, norms
    EXPERTS = "experts"
    INDEXER = "indexer"
    NEXTN = "nextn"


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of one block's tensors by kind."""

    attention: int = 0
    dense: int = 0
    experts: int = 0
    indexer: int = 0
    nextn: int = 0

    @property
    def total(self) -> int:
        return self.attention + self.dense + self.experts + self.indexer + self.nextn


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. `is_nextn`: it drafts tokens, is loaded only for that, and the trunk does not pass through it."""

    index: int
    weights: Weights
    kept: Kept
    is_nextn: bool
    n_ff: int  # width of the feed-forward that every token passes (dense, or the shared experts together)
    tensors: Mapping[str, int]  # bytes of each tensor by its name without "blk.N."


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes are bytes, widths are values. All of it is in the headers; nothing is guessed."""

    architecture: str
    name: str
    quantization: str  # "Q4_K", the type that most bytes of it have
    n_params: int
    file_bytes: int
    blocks: tuple[Block, ...]  # trunk first, then the NextN blocks
    token_embd_bytes: int  # stays on the host
    output_bytes: int  # output norm and output matrix, or the embedding once more where they are tied
    output_is_tied: bool
    other_bytes: int  # outside of the blocks, beside those
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    head_k: int  # width of a key head in the cache
    head_v: int
    head_k_mla: int  # of a key head before it is compressed to the latent; 0: no latent attention
    head_v_mla: int
    kv_lora_rank: int
    q_lora_rank: int
    n_rope: int
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    indexer_heads: int
    indexer_width: int  # of a cached indexer key; 0: no sparse attention
    indexer_top_k: int
    indexer_pool: int  # tokens that a pooling indexer takes together; 0: it looks at each
    window: int  # tokens that a sliding window sees back; 0: none
    cache_is_known: bool  # False: an architecture whose cache these rules do not cover; ask a dry run

    @property
    def n_blocks(self) -> int:
        """All blocks, those that draft too: what llama.cpp splits over devices, with the output as one more."""
        return len(self.blocks)

    @property
    def trunk(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if not block.is_nextn)

    @property
    def nextn(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.is_nextn)

    @property
    def weights_bytes(self) -> int:
        """Everything that is loaded, without the blocks that draft."""
        blocks = sum(block.weights.total for block in self.trunk)
        return blocks + self.token_embd_bytes + self.output_bytes + self.other_bytes

    @property
    def is_latent(self) -> bool:
        return self.head_k_mla > 0

    @property
    def is_recurrent(self) -> bool:
        return any(block.kept.state_values for block in self.blocks)


def read_shape(headers: Sequence[Header]) -> ModelShape:
    """`headers` of all shards, in their order; the first has the metadata. Raises ModelFileError where a header lacks
    what llama.cpp needs to load the model."""
    tensors = [tensor for header in headers for tensor in header.tensors]
    data = Metadata(headers[0])
    sizes = _Sizes(headers[0].path)
    for tensor in tensors:
        sizes.add(tensor)
    kept, known = kept_of_blocks(data)
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    blocks = tuple(_block(data, sizes, index, kept[index]) for index in range(data.n_blocks))
    return ModelShape(
        architecture=data.architecture,
        name=headers[0].text("general.name") or "",
        quantization=sizes.quantization(),
        n_params=sum(tensor.n_values for tensor in tensors),
        file_bytes=sum(header.file_bytes for header in headers),
        blocks=blocks,
        token_embd_bytes=sizes.token_embd,
        output_is_tied=not sizes.output,
        output_bytes=sizes.output_norm + (sizes.output or sizes.token_embd),
        other_bytes=sizes.other,
        n_vocab=embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0,
        n_embd=data.integer("embedding_length"),
        n_ctx_train=data.integer("context_length"),
        n_head=max(data.per_block("attention.head_count"), default=0),
        n_head_kv=max(data.n_head_kv, default=0),
        head_k=data.head_k,
        head_v=data.head_v,
        head_k_mla=data.integer("attention.key_length_mla"),
        head_v_mla=data.integer("attention.value_length_mla"),
        kv_lora_rank=data.integer("attention.kv_lora_rank"),
        q_lora_rank=data.integer("attention.q_lora_rank"),
        n_rope=data.integer("rope.dimension_count", data.head_k),
        n_expert=data.integer("expert_count"),
        n_expert_used=max(data.per_block("expert_used_count"), default=0),
        n_ff_expert=max(data.per_block("expert_feed_forward_length"), default=0),
        indexer_heads=data.integer("attention.indexer.head_count"),
        indexer_width=max((block.kept.indexer_values for block in blocks), default=0),
        indexer_top_k=data.integer("attention.indexer.top_k"),
        indexer_pool=data.integer("attention.indexer.kpool"),
        window=window_tokens(data) if any(keeps.in_window for keeps in kept) else 0,
        cache_is_known=known,
    )


def kind_of(name: str) -> Kind:
    """`name` without its "blk.N." in front."""
    if _EXPERTS.search("." + name):
        return Kind.EXPERTS
    if name.startswith("nextn."):
        return Kind.NEXTN
    if name.startswith(("indexer.", "indexer_")):
        return Kind.INDEXER
    if name.startswith(("ffn_", "exp_probs", "post_ffw", "layer_output", "post_ffn")):
        return Kind.DENSE
    return Kind.ATTENTION


class _Sizes:
    """Adds up bytes, tensor by tensor."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._blocks: dict[tuple[int, Kind], int] = {}
        self._types: dict[str, int] = {}
        self.n_ff: dict[int, int] = {}
        self.tensors: dict[int, dict[str, int]] = {}
        self.token_embd = self.output = self.output_norm = self.other = 0

    def add(self, tensor: TensorInfo) -> None:
        n_bytes = tensor.n_bytes
        if n_bytes is None:
            raise ModelFileError(
                f"'{self._path}': the tensor '{tensor.name}' has the unknown type {tensor.type_id}; "
                f"fetch a quantisation that this llama.cpp knows"
            )
        self._types[tensor.type_name] = self._types.get(tensor.type_name, 0) + n_bytes
        match = _BLOCK.fullmatch(tensor.name)
        if match:
            self._add_to_block(int(match[1]), match[2], tensor, n_bytes)
        elif tensor.name.startswith("token_embd."):
            self.token_embd += n_bytes
        elif tensor.name.startswith("output."):
            self.output += n_bytes
        elif tensor.name.startswith("output_"):
            self.output_norm += n_bytes
        else:
            self.other += n_bytes

    def _add_to_block(self, index: int, name: str, tensor: TensorInfo, n_bytes: int) -> None:
        kind = kind_of(name)
        self._blocks[index, kind] = self._blocks.get((index, kind), 0) + n_bytes
        self.tensors.setdefault(index, {})[name] = n_bytes
        if name in ("ffn_up.weight", "ffn_up_shexp.weight") and len(tensor.shape) > 1:
            self.n_ff[index] = tensor.shape[1]

    def of_block(self, index: int) -> Weights:
        return Weights(**{kind.value: self._blocks.get((index, kind), 0) for kind in Kind})

    def quantization(self) -> str:
        return max(self._types, key=lambda name: self._types[name], default="").upper()


def _block(data: Metadata, sizes: _Sizes, index: int, kept: Kept) -> Block:
    return Block(
        index=index,
        weights=sizes.of_block(index),
        kept=kept,
        is_nextn=index >= data.n_blocks - data.n_nextn,
        n_ff=sizes.n_ff.get(index, 0),
        tensors=sizes.tensors.get(index, {}),
    )
