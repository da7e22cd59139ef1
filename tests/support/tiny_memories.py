"""Makers of tiny models whose memory is not a plain cache: one recurrent state, or a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_gguf import CHAT_TEMPLATE, add_tokenizer, vocabulary

WINDOW = 32
_N_EMBD, _N_FF = 64, 128
_N_INNER, _N_STATE, _N_CONV, _N_RANK = 2 * _N_EMBD, 16, 4, 4

Matrix = Callable[..., NDArray[np.float32]]


def write_recurrent_gguf(path: Path) -> Path:
    """A Mamba: its memory of a sequence is one state, which cannot be cut."""
    writer, matrix = _begin(path, "mamba", n_layer=2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(_N_CONV)
    writer.add_ssm_inner_size(_N_INNER)
    writer.add_ssm_state_size(_N_STATE)
    writer.add_ssm_time_step_rank(_N_RANK)
    for layer in range(2):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", np.ones(_N_EMBD, dtype=np.float32))
        writer.add_tensor(f"{block}.ssm_in.weight", matrix(2 * _N_INNER, _N_EMBD))
        writer.add_tensor(f"{block}.ssm_conv1d.weight", matrix(_N_INNER, _N_CONV))
        writer.add_tensor(f"{block}.ssm_conv1d.bias", matrix(_N_INNER))
        writer.add_tensor(f"{block}.ssm_x.weight", matrix(_N_RANK + 2 * _N_STATE, _N_INNER))
        writer.add_tensor(f"{block}.ssm_dt.weight", matrix(_N_INNER, _N_RANK))
        writer.add_tensor(f"{block}.ssm_dt.bias", matrix(_N_INNER))
        writer.add_tensor(f"{block}.ssm_a", -np.ones((_N_INNER, _N_STATE), dtype=np.float32))
        writer.add_tensor(f"{block}.ssm_d", np.ones(_N_INNER, dtype=np.float32))
        writer.add_tensor(f"{block}.ssm_out.weight", matrix(_N_EMBD, _N_INNER))
    return _finish(writer, path)


def write_sliding_window_gguf(path: Path) -> Path:
    """A Cohere2: three of four layers see WINDOW tokens back, and their cache forgets what lies before."""
    writer, matrix = _begin(path, "cohere2", n_layer=4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(_N_FF)
    writer.add_sliding_window(WINDOW)
    writer.add_logit_scale(1.0)
    writer.add_rope_dimension_count(_N_EMBD // 2)
    for layer in range(4):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", np.ones(_N_EMBD, dtype=np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{block}.{name}.weight", matrix(_N_EMBD, _N_EMBD))
        writer.add_tensor(f"{block}.ffn_gate.weight", matrix(_N_FF, _N_EMBD))
        writer.add_tensor(f"{block}.ffn_up.weight", matrix(_N_FF, _N_EMBD))
        writer.add_tensor(f"{block}.ffn_down.weight", matrix(_N_EMBD, _N_FF))
    return _finish(writer, path)


def _begin(path: Path, architecture: str, n_layer: int) -> tuple[gguf.GGUFWriter, Matrix]:
    tokens = vocabulary()
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return values

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(n_layer)
    writer.add_vocab_size(len(tokens))
    add_tokenizer(writer, tokens, CHAT_TEMPLATE)
    writer.add_tensor("token_embd.weight", matrix(len(tokens), _N_EMBD))
    writer.add_tensor("output_norm.weight", np.ones(_N_EMBD, dtype=np.float32))
    return writer, matrix


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
