"""A maker of tiny llama-architecture models with random weights: about 0.5 MB, deterministic, loaded in milliseconds.

The vocabulary is SentencePiece-like: control tokens, 256 byte tokens, printable ASCII and the prefixes of some words.
So tokenisation merges, byte fallback splits characters over tokens, and most generated tokens are printable. Control
tokens have all-zero output rows: they come up rarely unless a logit bias asks for them.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL_TEXTS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>")
BOS_TEXT, EOS_TEXT = "<s>", "<|im_end|>"
N_CTX_TRAIN = 4096

_N_EMBD, _N_HEAD_KV, _N_LAYER, _N_FF = 64, 1, 2, 128
_WORDS = (
    "the of and to in is you that it he was for on are with as his they be at one have this from or had by hot word"
)
_SPACE = "\u2581"


def vocabulary() -> list[str]:
    """Token texts by id."""
    pieces = [*CONTROL_TEXTS, *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    for word in _WORDS.split():
        spaced = _SPACE + word
        pieces += [spaced[:end] for end in range(2, len(spaced) + 1) if spaced[:end] not in pieces]
    return pieces


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    n_ctx_train: int = N_CTX_TRAIN,
    chat_template: str | None = CHAT_TEMPLATE,
    architecture: str = "llama",
    n_head: int = 2,
) -> Path:
    """Write the model to `path` and return it. The same arguments give the same bytes. `architecture` only renames:
    llama.cpp loads "llama"; other names serve tests of refusals. With 2 heads, of size 32, a quantised cache fits."""
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(_N_LAYER)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(_N_HEAD_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_N_EMBD // n_head)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_tokenizer(writer, tokens, chat_template)
    for name, tensor in _tensors(len(tokens), seed, n_head).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str], chat_template: str | None) -> None:
    kinds = [_kind(token) for token in tokens]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if kind != gguf.TokenType.NORMAL else -float(i) for i, kind in enumerate(kinds)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokens.index(BOS_TEXT))
    writer.add_eos_token_id(tokens.index(EOS_TEXT))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _kind(token: str) -> gguf.TokenType:
    if token == "<unk>":
        return gguf.TokenType.UNKNOWN
    if token in CONTROL_TEXTS:
        return gguf.TokenType.CONTROL
    if token.startswith("<0x"):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL


def _tensors(n_vocab: int, seed: int, n_head: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(seed)
    n_kv = _N_EMBD // n_head * _N_HEAD_KV

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
        values = (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)
        return values

    ones = np.ones(_N_EMBD, dtype=np.float32)
    output = matrix(n_vocab, _N_EMBD, 3.0)
    output[len(CONTROL_TEXTS) : len(CONTROL_TEXTS) + 256] *= 0.5  # bytes less often than printable text
    output[: len(CONTROL_TEXTS)] = 0.0
    tensors = {"token_embd.weight": matrix(n_vocab, _N_EMBD, 8.0), "output_norm.weight": ones, "output.weight": output}
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
