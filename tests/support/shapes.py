"""Files with everything but the weights: true dimensions of GLM models, in any quantisation and number of shards.

The headers are complete, the tensor data is a hole (sparse files), so 434 GiB cost a few kilobytes of disk. llama.cpp
takes them under `no_alloc`, where it computes sizes and reads no data. Dimensions are those of the models' public
configurations. From the project's root:

    python -m tests.support.shapes glm-5.2 /tmp/shapes --quant ud-q4_k_m --shards 11
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.fit.facts import Kind, kind_of
from tests.support.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U16, U32, Array, encoded, padded, text

_ALIGNMENT = 32
_TYPES = {  # name: (ggml's number, values in a block, bytes of a block)
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (30, 1, 2),
    "q8_0": (8, 32, 34),
    "q4_0": (2, 32, 18),
    "q4_K": (12, 256, 144),
    "q5_K": (13, 256, 176),
    "q6_K": (14, 256, 210),
}


@dataclass(frozen=True)
class Dimensions:
    """A model as its configuration has it. Latent attention has `kv_lora`, grouped attention `n_head_kv`."""

    architecture: str
    n_layer: int
    n_nextn: int
    n_embd: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    n_dense: int
    n_ff: int
    n_head_kv: int = 1
    head: int = 0
    qk_norm: bool = False
    kv_lora: int = 0
    q_lora: int = 0
    nope: int = 0
    rope: int = 0
    head_v: int = 0
    indexer_heads: int = 0
    indexer_width: int = 0
    top_k: int = 0


def _glm_5(n_ctx_train: int) -> Dimensions:
    return Dimensions(
        architecture="glm-dsa",
        n_layer=78,
        n_nextn=1,
        n_embd=6144,
        n_head=64,
        n_vocab=154880,
        n_ctx_train=n_ctx_train,
        n_expert=256,
        n_expert_used=8,
        n_ff_expert=2048,
        n_dense=3,
        n_ff=12288,
        kv_lora=512,
        q_lora=2048,
        nope=192,
        rope=64,
        head_v=256,
        indexer_heads=32,
        indexer_width=128,
        top_k=2048,
    )


MODELS = {
    # zai-org/GLM-5.2, GLM-5.1, GLM-4.6, GLM-4.5-Air, GLM-4.7-Flash: config.json
    "glm-5.2": _glm_5(1048576),
    "glm-5.1": _glm_5(202752),
    "glm-4.6": Dimensions(
        "glm4moe", 92, 1, 5120, 96, 151552, 202752, 160, 8, 1536, 3, 12288, n_head_kv=8, head=128, qk_norm=True
    ),
    "glm-4.5-air": Dimensions(
        "glm4moe", 46, 1, 4096, 96, 151552, 131072, 128, 8, 1408, 1, 10944, n_head_kv=8, head=128
    ),
    "glm-4.7-flash": Dimensions(
        "deepseek2",
        47,
        0,
        2048,
        20,
        154880,
        202752,
        64,
        4,
        1536,
        1,
        10240,
        kv_lora=512,
        q_lora=768,
        nope=192,
        rope=64,
        head_v=256,
    ),
}


def quantized(quant: str, name: str, shape: tuple[int, ...], block: int, dimensions: Dimensions) -> str:
    """The type of a tensor in a quantisation. "ud-q4_k_m" mixes as published files of that name do: experts in 4 and 5
    bits (the first three layers of them in 6), everything that all tokens pass in 8."""
    if len(shape) == 1 or name.startswith(("ffn_gate_inp", "exp_probs")):
        return "f32"
    if quant != "ud-q4_k_m":
        return quant
    if name == "output.weight":
        return "q6_K"
    if kind_of(name) is not Kind.EXPERTS or shape[0] % 256:
        return "q8_0"
    if name.startswith("ffn_down"):
        return "q6_K" if dimensions.n_dense <= block < dimensions.n_dense + 3 else "q5_K"
    return "q4_K"


def tensors(dimensions: Dimensions) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(block, name without "blk.N.", shape with the contiguous dimension first); block -1 is outside of them."""
    d = dimensions
    yield -1, "token_embd.weight", (d.n_embd, d.n_vocab)
    for block in range(d.n_layer + d.n_nextn):
        yield from ((block, name, shape) for name, shape in _block(d, block))
    yield -1, "output_norm.weight", (d.n_embd,)
    yield -1, "output.weight", (d.n_embd, d.n_vocab)


def write_shape(
    folder: Path,
    model: str | Dimensions,
    quant: str = "ud-q4_k_m",
    *,
    n_shards: int = 1,
    name: str = "",
    vocabulary: bool = False,
) -> Path:
    """Write the shards into `folder`; returns the first. `vocabulary`: with texts and merges of a real tokenizer's
    size, which take llama.cpp half a second to read; without, the model only knows how many tokens there are."""
    d = MODELS[model] if isinstance(model, str) else model
    stem = f"{name or (model if isinstance(model, str) else 'shape')}-{quant}"
    entries = [
        (
            name if block < 0 else f"blk.{block}.{name}",
            shape,
            *_TYPES[quantized(quant, name, shape, block, d)],
        )
        for block, name, shape in tensors(d)
    ]
    paths = []
    for index, shard in enumerate(_split(entries, n_shards)):
        path = folder / (f"{stem}-{index + 1:05d}-of-{n_shards:05d}.gguf" if n_shards > 1 else f"{stem}.gguf")
        pairs = _metadata(d, vocabulary) if index == 0 else []
        if n_shards > 1:
            pairs += [("split.no", U16, index), ("split.count", U16, n_shards)]
            pairs += [("split.tensors.count", I32, len(entries))]
        write_file(path, pairs, shard)
        paths.append(path)
    return paths[0]


Entry = tuple[str, tuple[int, ...], int, int, int]
Pair = tuple[str, int, object]


def _n_bytes(entry: Entry) -> int:
    _, shape, _, n_values, n_bytes = entry
    count = 1
    for size in shape:
        count *= size
    return count // n_values * n_bytes


def _split(entries: list[Entry], n_shards: int) -> list[list[Entry]]:
    total = sum(_n_bytes(entry) for entry in entries)
    shards: list[list[Entry]] = [[] for _ in range(n_shards)]
    at = 0
    for entry in entries:
        shards[min(at * n_shards // total, n_shards - 1)].append(entry)
        at += _n_bytes(entry)
    return shards


def write_file(path: Path, pairs: list[Pair], entries: list[Entry]) -> None:
    """A header with `pairs` and `entries`, and a hole where their data would be."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(pairs))]
    head += [text(key) + struct.pack("<I", type_) + encoded(type_, value) for key, type_, value in pairs]
    at = 0
    for entry in entries:
        name, shape, type_id, _, _ = entry
        head.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, at))
        at = padded(at + _n_bytes(entry), _ALIGNMENT)
    data = b"".join(head)
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(padded(len(data), _ALIGNMENT) + at)


def _block(d: Dimensions, block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_norm.weight", (d.n_embd,)
    yield from _latent(d) if d.kv_lora else _grouped(d)
    if block < d.n_dense:
        yield "ffn_gate.weight", (d.n_embd, d.n_ff)
        yield "ffn_down.weight", (d.n_ff, d.n_embd)
        yield "ffn_up.weight", (d.n_embd, d.n_ff)
    else:
        yield "ffn_gate_inp.weight", (d.n_embd, d.n_expert)
        yield "exp_probs_b.bias", (d.n_expert,)
        yield "ffn_gate_exps.weight", (d.n_embd, d.n_ff_expert, d.n_expert)
        yield "ffn_down_exps.weight", (d.n_ff_expert, d.n_embd, d.n_expert)
        yield "ffn_up_exps.weight", (d.n_embd, d.n_ff_expert, d.n_expert)
        yield "ffn_gate_shexp.weight", (d.n_embd, d.n_ff_expert)
        yield "ffn_down_shexp.weight", (d.n_ff_expert, d.n_embd)
        yield "ffn_up_shexp.weight", (d.n_embd, d.n_ff_expert)
    if block >= d.n_layer:
        yield "nextn.eh_proj.weight", (2 * d.n_embd, d.n_embd)
        yield "nextn.enorm.weight", (d.n_embd,)
        yield "nextn.hnorm.weight", (d.n_embd,)


def _latent(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_q_a.weight", (d.n_embd, d.q_lora)
    yield "attn_q_a_norm.weight", (d.q_lora,)
    yield "attn_q_b.weight", (d.q_lora, d.n_head * (d.nope + d.rope))
    yield "attn_kv_a_mqa.weight", (d.n_embd, d.kv_lora + d.rope)
    yield "attn_kv_a_norm.weight", (d.kv_lora,)
    yield "attn_k_b.weight", (d.nope, d.kv_lora, d.n_head)
    yield "attn_v_b.weight", (d.kv_lora, d.head_v, d.n_head)
    yield "attn_output.weight", (d.n_head * d.head_v, d.n_embd)
    yield "ffn_norm.weight", (d.n_embd,)
    if d.indexer_width:  # in every block, used or not, as the published checkpoints have it
        yield "indexer.k_norm.weight", (d.indexer_width,)
        yield "indexer.k_norm.bias", (d.indexer_width,)
        yield "indexer.proj.weight", (d.n_embd, d.indexer_heads)
        yield "indexer.attn_k.weight", (d.n_embd, d.indexer_width)
        yield "indexer.attn_q_b.weight", (d.q_lora, d.indexer_heads * d.indexer_width)


def _grouped(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_q.weight", (d.n_embd, d.n_head * d.head)
    yield "attn_k.weight", (d.n_embd, d.n_head_kv * d.head)
    yield "attn_v.weight", (d.n_embd, d.n_head_kv * d.head)
    yield "attn_q.bias", (d.n_head * d.head,)
    yield "attn_k.bias", (d.n_head_kv * d.head,)
    yield "attn_v.bias", (d.n_head_kv * d.head,)
    yield "attn_output.weight", (d.n_head * d.head, d.n_embd)
    if d.qk_norm:
        yield "attn_q_norm.weight", (d.head,)
        yield "attn_k_norm.weight", (d.head,)
    yield "post_attention_norm.weight", (d.n_embd,)


def _metadata(d: Dimensions, vocabulary: bool) -> list[Pair]:
    pairs: list[Pair] = [("general.architecture", STRING, d.architecture)]
    numbers = {
        "context_length": d.n_ctx_train,
        "embedding_length": d.n_embd,
        "block_count": d.n_layer + d.n_nextn,
        "nextn_predict_layers": d.n_nextn,
        "feed_forward_length": d.n_ff,
        "expert_feed_forward_length": d.n_ff_expert,
        "expert_count": d.n_expert,
        "expert_used_count": d.n_expert_used,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "leading_dense_block_count": d.n_dense,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": d.n_head_kv,
        "vocab_size": d.n_vocab,
    }
    if d.kv_lora:
        numbers |= {
            "attention.q_lora_rank": d.q_lora,
            "attention.kv_lora_rank": d.kv_lora,
            "attention.key_length": d.kv_lora + d.rope,
            "attention.value_length": d.kv_lora,
            "attention.key_length_mla": d.nope + d.rope,
            "attention.value_length_mla": d.head_v,
            "rope.dimension_count": d.rope,
        }
    else:
        numbers |= {
            "attention.key_length": d.head,
            "attention.value_length": d.head,
            "rope.dimension_count": d.head // 2,
        }
    if d.indexer_width:
        numbers |= {
            "attention.indexer.head_count": d.indexer_heads,
            "attention.indexer.key_length": d.indexer_width,
            "attention.indexer.top_k": d.top_k,
        }
    pairs += [(f"{d.architecture}.{key}", U32, value) for key, value in numbers.items()]
    pairs += [
        (f"{d.architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        (f"{d.architecture}.expert_weights_scale", F32, 2.5),
        (f"{d.architecture}.expert_weights_norm", BOOL, 1),
    ]
    return pairs + (_tokenizer(d.n_vocab) if vocabulary else [("tokenizer.ggml.model", STRING, "no_vocab")])


def _tokenizer(n_vocab: int) -> list[Pair]:
    texts = [f"token{index:06d}" for index in range(n_vocab)]
    merges = [f"tok{index:06d} en{index:06d}" for index in range(2 * n_vocab + 8_328)]
    return [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "glm4"),
        ("tokenizer.ggml.tokens", ARRAY, Array(STRING, texts)),
        ("tokenizer.ggml.token_type", ARRAY, Array(I32, [1] * n_vocab)),
        ("tokenizer.ggml.merges", ARRAY, Array(STRING, merges)),
        ("tokenizer.ggml.eos_token_id", U32, n_vocab - 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model file with true dimensions and no data.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="ud-q4_k_m", choices=["ud-q4_k_m", *_TYPES])
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--vocabulary", action="store_true", help="with a tokenizer of real size")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(write_shape(given.folder, given.model, given.quant, n_shards=given.shards, vocabulary=given.vocabulary))


if __name__ == "__main__":
    main()
