"""A small model of GLM-5.3-Flash's kind without data: recurrent blocks, latent attention behind a pooling indexer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, Array
from tests.support.shapes import Pair, write_file

_ARCHITECTURE = "glm5-next"
_F32 = (0, 1, 4)
_N_EMBD, _N_HEAD, _N_VOCAB, _N_EXPERT, _N_FF = 256, 4, 1000, 8, 64
_KDA, _CONV, _HYPER = 32, 4, 4
_Q_LORA, _KV_LORA, _NOPE, _V = 64, 64, 32, 32
_INDEXER_HEADS, _INDEXER, _POOL = 4, 32, 4
N_LAYER = 8
ATTENDING = (3, 7)  # the other blocks are recurrent


def write_hybrid_shape(path: Path) -> Path:
    heads = [1 if layer in ATTENDING else 0 for layer in range(N_LAYER)]
    pairs: list[Pair] = [("general.architecture", STRING, _ARCHITECTURE)]
    numbers = {
        "context_length": 1 << 20,
        "embedding_length": _N_EMBD,
        "block_count": N_LAYER,
        "feed_forward_length": _N_FF,
        "expert_feed_forward_length": _N_FF,
        "expert_count": _N_EXPERT,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "attention.head_count": _N_HEAD,
        "attention.key_length": _KV_LORA,
        "attention.value_length": _KV_LORA,
        "attention.key_length_mla": _NOPE,
        "attention.value_length_mla": _V,
        "attention.q_lora_rank": _Q_LORA,
        "attention.kv_lora_rank": _KV_LORA,
        "attention.indexer.head_count": _INDEXER_HEADS,
        "attention.indexer.key_length": _INDEXER,
        "attention.indexer.top_k": 64,
        "attention.indexer.kpool": _POOL,
        "rope.dimension_count": 0,
        "ssm.conv_kernel": _CONV,
        "kda.head_dim": _KDA,
        "hyper_connection.count": _HYPER,
        "hyper_connection.sinkhorn_iterations": 4,
        "vocab_size": _N_VOCAB,
    }
    pairs += [(f"{_ARCHITECTURE}.{key}", U32, value) for key, value in numbers.items()]
    pairs += [
        (f"{_ARCHITECTURE}.attention.head_count_kv", ARRAY, Array(I32, heads)),
        (f"{_ARCHITECTURE}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        (f"{_ARCHITECTURE}.hyper_connection.epsilon", F32, 1e-5),
        (f"{_ARCHITECTURE}.expert_weights_scale", F32, 2.5),
        (f"{_ARCHITECTURE}.expert_weights_norm", BOOL, 1),
        ("tokenizer.ggml.model", STRING, "no_vocab"),
    ]
    write_file(path, pairs, [(name, shape, *_F32) for name, shape in _tensors()])
    return path


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (_N_EMBD, _N_VOCAB)
    yield "output_norm.weight", (_N_EMBD,)
    yield "output.weight", (_N_EMBD, _N_VOCAB)
    for layer in range(N_LAYER):
        for name, shape in _block(layer):
            yield f"blk.{layer}.{name}", shape


def _block(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mixes = (2 + _HYPER) * _HYPER
    yield "attn_norm.weight", (_N_EMBD,)
    yield "ffn_norm.weight", (_N_EMBD,)
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn.weight", (_HYPER * _N_EMBD, mixes)
        yield f"hc_{part}_base.weight", (mixes,)
        yield f"hc_{part}_scale.weight", (3,)
    yield from _latent() if layer in ATTENDING else _recurrent()
    if layer < 1:
        yield "ffn_gate.weight", (_N_EMBD, _N_FF)
        yield "ffn_down.weight", (_N_FF, _N_EMBD)
        yield "ffn_up.weight", (_N_EMBD, _N_FF)
        return
    yield "ffn_gate_inp.weight", (_N_EMBD, _N_EXPERT)
    yield "exp_probs_b.bias", (_N_EXPERT,)
    for name in ("gate", "up"):
        yield f"ffn_{name}_exps.weight", (_N_EMBD, _N_FF, _N_EXPERT)
        yield f"ffn_{name}_shexp.weight", (_N_EMBD, _N_FF)
    yield "ffn_down_exps.weight", (_N_FF, _N_EMBD, _N_EXPERT)
    yield "ffn_down_shexp.weight", (_N_FF, _N_EMBD)


def _recurrent() -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = _KDA * _N_HEAD
    for name in ("q", "k", "v"):
        yield f"ssm_conv1d_{name}.weight", (_CONV, 1, inner)
        yield f"attn_{name}.weight", (_N_EMBD, inner)
    for name in ("f", "g"):
        yield f"ssm_{name}_a.weight", (_N_EMBD, _KDA)
        yield f"ssm_{name}_b.weight", (_KDA, inner)
    yield "ssm_beta.weight", (_N_EMBD, _N_HEAD)
    yield "ssm_a", (_N_HEAD,)
    yield "ssm_dt.bias", (inner,)
    yield "ssm_norm.weight", (_KDA,)
    yield "attn_output.weight", (inner, _N_EMBD)


def _latent() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_q_a_norm.weight", (_Q_LORA,)
    yield "attn_kv_a_norm.weight", (_KV_LORA,)
    yield "attn_q_a.weight", (_N_EMBD, _Q_LORA)
    yield "attn_q_b.weight", (_Q_LORA, _N_HEAD * _NOPE)
    yield "attn_kv_a_mqa.weight", (_N_EMBD, _KV_LORA)
    yield "attn_k_b.weight", (_NOPE, _KV_LORA, _N_HEAD)
    yield "attn_v_b.weight", (_KV_LORA, _V, _N_HEAD)
    yield "attn_output.weight", (_N_HEAD * _V, _N_EMBD)
    yield "indexer.k_norm.weight", (_INDEXER,)
    yield "indexer.k_norm.bias", (_INDEXER,)
    yield "indexer.proj.weight", (_N_EMBD, _INDEXER_HEADS)
    yield "indexer.attn_k.weight", (_N_EMBD, _INDEXER)
    yield "indexer.attn_q_b.weight", (_Q_LORA, _INDEXER_HEADS * _INDEXER)
    yield "indexer_compressor_gate.weight", (_N_EMBD, _INDEXER)
    yield "indexer_compressor_ape.weight", (_INDEXER, _POOL)
