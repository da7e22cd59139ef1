"""A GLM that knows nothing: tiny-glm's vocabulary and template around random weights. What it writes in good order it
was made to write."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TINY_GLM = Path(__file__).parents[2] / "models" / "tiny-glm"

_N_EMBD, _N_HEAD, _N_HEAD_KV, _N_LAYER, _N_FF = 64, 2, 1, 2, 128
_N_CTX_TRAIN = 32768


def write_random_glm(path: Path, seed: int = 0) -> Path:
    """Of llama's architecture, about 1.2 MB. The same seed gives the same bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random-glm")
    writer.add_context_length(_N_CTX_TRAIN)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(_N_LAYER)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(_N_HEAD_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_N_EMBD // _N_HEAD)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    n_vocab = _copy_vocabulary(writer)
    writer.add_vocab_size(n_vocab)
    writer.add_chat_template((TINY_GLM / "chat_template.jinja").read_text(encoding="utf-8"))
    for name, tensor in _tensors(n_vocab, seed).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_vocabulary(writer: gguf.GGUFWriter) -> int:
    reader = gguf.GGUFReader(next(TINY_GLM.glob("*-00001-of-*.gguf")))
    n_vocab = 0
    for name, field in reader.fields.items():
        if not name.startswith("tokenizer.") or name == "tokenizer.chat_template":
            continue
        value = field.contents()
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
            n_vocab = max(n_vocab, len(value) if name == "tokenizer.ggml.tokens" else 0)
        else:
            writer.add_key_value(name, value, field.types[0])
    return n_vocab


def _tensors(n_vocab: int, seed: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(seed)
    n_kv = _N_EMBD // _N_HEAD * _N_HEAD_KV

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
        values = (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)
        return values

    ones = np.ones(_N_EMBD, dtype=np.float32)
    tensors = {
        "token_embd.weight": matrix(n_vocab, _N_EMBD, 8.0),
        "output_norm.weight": ones,
        "output.weight": matrix(n_vocab, _N_EMBD, 3.0),
    }
    for layer in range(_N_LAYER):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.attn_q.weight": matrix(_N_EMBD, _N_EMBD, 2.0),
            f"blk.{layer}.attn_k.weight": matrix(n_kv, _N_EMBD, 2.0),
            f"blk.{layer}.attn_v.weight": matrix(n_kv, _N_EMBD, 1.0),
            f"blk.{layer}.attn_output.weight": matrix(_N_EMBD, _N_EMBD, 1.0),
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": matrix(_N_FF, _N_EMBD, 1.0),
            f"blk.{layer}.ffn_up.weight": matrix(_N_FF, _N_EMBD, 1.0),
            f"blk.{layer}.ffn_down.weight": matrix(_N_EMBD, _N_FF, 1.0),
        }
    return tensors
