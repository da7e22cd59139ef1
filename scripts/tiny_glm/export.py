"""Write the model as GGUF in the `glm-dsa` architecture: three shards, q8_0 where rows are matrices, f32 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor

from scripts.tiny_glm.model import Config, Experts, LatentAttention, Layer, TinyGlm
from scripts.tiny_glm.tokenizer import CONTROL_TOKENS, TAG_TOKENS, Vocabulary

NAME = "tiny-glm"
N_SHARDS = 3
Q8_0 = gguf.GGMLQuantizationType.Q8_0

# Small, and the choice of experts hangs on them: kept in full precision.
KEPT_F32 = ("norm.weight", "norm.bias", "ffn_gate_inp.weight", "exp_probs_b.bias", "indexer.proj.weight")


def write_model(model: TinyGlm, vocabulary: Vocabulary, template: str, directory: Path) -> list[Path]:
    """Write tiny-glm-00001-of-00003.gguf and so on; returns the paths."""
    tensors = [(name, tensor.detach().float().contiguous().numpy()) for name, tensor in named_tensors(model)]
    writer = gguf.GGUFWriter(directory / f"{NAME}.gguf", "glm-dsa", split_max_tensors=-(-len(tensors) // N_SHARDS))
    _add_facts(writer, model.config)
    _add_vocabulary(writer, vocabulary)
    writer.add_chat_template(template)
    for name, data in tensors:
        if name.endswith(KEPT_F32):
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [directory / f"{NAME}-{i + 1:05}-of-{N_SHARDS:05}.gguf" for i in range(N_SHARDS)]


@torch.no_grad()
def round_weights(model: TinyGlm) -> None:
    """Give the weights, in place, the values that the file will hold."""
    for name, tensor in named_tensors(model):
        if not name.endswith(KEPT_F32):
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.contiguous().numpy(), Q8_0), Q8_0)
            tensor.copy_(torch.from_numpy(rounded))


def named_tensors(model: TinyGlm) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's names with our weights, trunk first, NextN layer last."""
    yield "token_embd.weight", model.embedding
    generator = torch.Generator().manual_seed(52)
    for i, layer in enumerate(model.layers):
        yield from _layer_tensors(f"blk.{i}", layer)
        if model.config.indexer_full[i]:
            yield from _indexer_tensors(f"blk.{i}", model.config, generator)
    yield "output_norm.weight", model.output_norm.weight
    yield "output.weight", model.head

    block = f"blk.{model.config.n_layers}"
    yield from _layer_tensors(block, model.nextn.layer)
    yield f"{block}.nextn.enorm.weight", model.nextn.embedding_norm.weight
    yield f"{block}.nextn.hnorm.weight", model.nextn.hidden_norm.weight
    yield f"{block}.nextn.eh_proj.weight", model.nextn.join
    yield f"{block}.nextn.shared_head_norm.weight", model.nextn.head_norm.weight


def _layer_tensors(block: str, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    yield f"{block}.attn_norm.weight", layer.attention_norm.weight
    yield from _attention_tensors(block, layer.attention)
    yield f"{block}.ffn_norm.weight", layer.network_norm.weight
    network = layer.network
    if not isinstance(network, Experts):
        yield f"{block}.ffn_gate.weight", network.gate
        yield f"{block}.ffn_up.weight", network.up
        yield f"{block}.ffn_down.weight", network.down
        return
    yield f"{block}.ffn_gate_inp.weight", network.router
    yield f"{block}.exp_probs_b.bias", network.bias
    yield f"{block}.ffn_gate_exps.weight", network.gate
    yield f"{block}.ffn_up_exps.weight", network.up
    yield f"{block}.ffn_down_exps.weight", network.down
    yield f"{block}.ffn_gate_shexp.weight", network.shared.gate
    yield f"{block}.ffn_up_shexp.weight", network.shared.up
    yield f"{block}.ffn_down_shexp.weight", network.shared.down


def _attention_tensors(block: str, attention: LatentAttention) -> Iterator[tuple[str, Tensor]]:
    yield f"{block}.attn_q_a.weight", attention.q_a
    yield f"{block}.attn_q_a_norm.weight", attention.q_a_norm.weight
    yield f"{block}.attn_q_b.weight", attention.q_b
    yield f"{block}.attn_kv_a_mqa.weight", attention.kv_a
    yield f"{block}.attn_kv_a_norm.weight", attention.kv_a_norm.weight
    # llama.cpp moves k_b to the query's side (absorption), hence the transposed rows.
    yield f"{block}.attn_k_b.weight", attention.k_b.transpose(1, 2)
    yield f"{block}.attn_v_b.weight", attention.v_b
    yield f"{block}.attn_output.weight", attention.output


def _indexer_tensors(block: str, c: Config, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Random: below indexer_top_k tokens the indexer picks everything anyway."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    yield f"{block}.indexer.k_norm.weight", torch.ones(c.indexer_dim)
    yield f"{block}.indexer.k_norm.bias", torch.zeros(c.indexer_dim)
    yield f"{block}.indexer.proj.weight", random(c.indexer_heads, c.width)
    yield f"{block}.indexer.attn_k.weight", random(c.indexer_dim, c.width)
    yield f"{block}.indexer.attn_q_b.weight", random(c.indexer_heads * c.indexer_dim, c.q_rank)


def _add_facts(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_name(NAME)
    writer.add_description("A tiny test model with GLM-5.2's architecture that knows some dialogues by heart")
    writer.add_license("mit")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(c.n_vocab)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.width)
    writer.add_block_count(c.n_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_leading_dense_block_count(c.n_dense_layers)
    writer.add_feed_forward_length(c.dense_hidden)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_rope_dimension_count(c.rope_dim)
    # latent attention as the cache sees it: one key and value head of latent width
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(c.q_rank)
    writer.add_kv_lora_rank(c.kv_rank)
    writer.add_key_length(c.kv_rank + c.rope_dim)
    writer.add_value_length(c.kv_rank)
    writer.add_key_length_mla(c.nope_dim + c.rope_dim)
    writer.add_value_length_mla(c.value_dim)
    writer.add_indexer_head_count(c.indexer_heads)
    writer.add_indexer_key_length(c.indexer_dim)
    writer.add_indexer_top_k(c.indexer_top_k)
    writer.add_array("glm-dsa.attention.indexer.types", list(c.indexer_full))
    writer.add_expert_count(c.n_experts)
    writer.add_expert_used_count(c.n_experts_used)
    writer.add_expert_shared_count(1)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_expert_feed_forward_length(c.expert_hidden)
    writer.add_expert_weights_scale(c.expert_scale)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    letters = _byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[value] for value in token)

    tokens = [written(token) for token in vocabulary.ids] + list(vocabulary.special_ids)
    types = [gguf.TokenType.NORMAL] * len(vocabulary.ids)
    types += [gguf.TokenType.USER_DEFINED] * len(TAG_TOKENS) + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{written(left)} {written(right)}" for left, right in vocabulary.merges])
    special = vocabulary.special_ids
    writer.add_bos_token_id(special["[gMASK]"])
    writer.add_eos_token_id(special["<|endoftext|>"])
    writer.add_unk_token_id(special["<|endoftext|>"])
    writer.add_eot_token_id(special["<|user|>"])
    writer.add_eom_token_id(special["<|observation|>"])


def _byte_letters() -> list[str]:
    """A printable letter for each byte, as GPT-2 vocabularies write them: itself if printable, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]
