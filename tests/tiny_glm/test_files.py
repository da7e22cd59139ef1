"""The files that are shipped: whole, small, and with GLM-5.2's metadata."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf
import pytest

from scripts.tiny_glm.tokenizer import CONTROL_TOKENS, TAG_TOKENS


@pytest.fixture(scope="module")
def readers(shards: list[Path]) -> list[gguf.GGUFReader]:
    return [gguf.GGUFReader(shard) for shard in shards]


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def test_the_recipe_names_every_shard_with_its_size_and_hash(recipe: dict[str, Any], shards: list[Path]) -> None:
    for shard, entry in zip(shards, recipe["shards"], strict=True):
        data = shard.read_bytes()
        assert len(data) == entry["bytes"]
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    assert [shard.name for shard in shards] == [f"tiny-glm-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert sorted(path.name for path in shards[0].parent.glob("*.gguf")) == [shard.name for shard in shards]


def test_the_shards_stay_under_three_megabytes(shards: list[Path]) -> None:
    assert sum(shard.stat().st_size for shard in shards) <= 3_000_000


def test_each_shard_knows_its_place(readers: list[gguf.GGUFReader]) -> None:
    n_tensors = sum(len(reader.tensors) for reader in readers)
    for i, reader in enumerate(readers):
        assert value(reader, "split.no") == i
        assert value(reader, "split.count") == 3
        assert value(reader, "split.tensors.count") == n_tensors
        assert len(reader.tensors) >= 10


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("general.architecture", "glm-dsa"),
        ("general.license", "mit"),
        ("general.file_type", gguf.LlamaFileType.MOSTLY_Q8_0),
        ("glm-dsa.context_length", 1_048_576),
        ("glm-dsa.block_count", 6),
        ("glm-dsa.nextn_predict_layers", 1),
        ("glm-dsa.leading_dense_block_count", 2),
        ("glm-dsa.expert_count", 8),
        ("glm-dsa.expert_used_count", 2),
        ("glm-dsa.expert_shared_count", 1),
        ("glm-dsa.expert_gating_func", gguf.ExpertGatingFuncType.SIGMOID),
        ("glm-dsa.expert_weights_norm", True),
        ("glm-dsa.expert_weights_scale", 2.5),
        ("glm-dsa.attention.head_count_kv", 1),
        ("glm-dsa.attention.q_lora_rank", 96),
        ("glm-dsa.attention.kv_lora_rank", 64),
        ("glm-dsa.attention.key_length", 128),
        ("glm-dsa.attention.value_length", 64),
        ("glm-dsa.attention.key_length_mla", 96),
        ("glm-dsa.attention.value_length_mla", 64),
        ("glm-dsa.attention.indexer.top_k", 2048),
        ("glm-dsa.attention.indexer.types", [True, True, True, False, False]),
        ("glm-dsa.rope.freq_base", 8e6),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "glm4"),
    ],
)
def test_metadata(readers: list[gguf.GGUFReader], key: str, expected: object) -> None:
    assert value(readers[0], key) == expected


def test_the_special_tokens_have_glms_roles_and_types(readers: list[gguf.GGUFReader]) -> None:
    tokens, types = (value(readers[0], f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    roles = {"bos": "[gMASK]", "eos": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>"}
    for role, text in roles.items():
        assert tokens[value(readers[0], f"tokenizer.ggml.{role}_token_id")] == text
    for text in CONTROL_TOKENS:
        assert types[tokens.index(text)] == gguf.TokenType.CONTROL
    for text in TAG_TOKENS:
        assert types[tokens.index(text)] == gguf.TokenType.USER_DEFINED


def test_the_template_file_is_the_one_in_the_model(readers: list[gguf.GGUFReader], shards: list[Path]) -> None:
    file = shards[0].parent / "chat_template.jinja"
    assert value(readers[0], "tokenizer.chat_template") == file.read_text(encoding="utf-8")


def test_every_part_of_the_architecture_is_there(readers: list[gguf.GGUFReader]) -> None:
    names = {tensor.name for reader in readers for tensor in reader.tensors}
    indexed = {name.split(".")[1] for name in names if ".indexer.attn_k." in name}
    with_experts = {name.split(".")[1] for name in names if ".ffn_gate_exps." in name}
    assert indexed == {"0", "1", "2"}  # the full layers; the others share layer 2's choice
    assert with_experts == {"2", "3", "4", "5"}
    assert {"blk.5.nextn.eh_proj.weight", "blk.5.nextn.shared_head_norm.weight"} <= names
    assert {"blk.0.attn_kv_a_mqa.weight", "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"} <= names
