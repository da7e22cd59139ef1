"""llama.cpp's logits against those that PyTorch wrote down when the model was made (scripts/tiny_glm/compare.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.tiny_glm.corpus import MODEL_DIRECTORY
from scripts.tiny_glm.llama import Llama
from scripts.tiny_glm.unquantized import write_unquantized

GOLDEN = MODEL_DIRECTORY / "golden.npz"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llama(shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    copy = tmp_path_factory.mktemp("unquantized") / "tiny-glm.gguf"
    write_unquantized(shards, copy)
    with Llama(copy, cache="f32", flash_attention=False, n_ctx=1024) as llama:
        yield llama


@pytest.mark.parametrize("i", range(3))
def test_the_trunk_computes_what_pytorch_computes(llama: Llama, i: int) -> None:
    with np.load(GOLDEN) as golden:
        text, expected = str(golden[f"text{i}"]), golden[f"trunk{i}"]
    logits = llama.logits(llama.tokenize(text))[-len(expected) :]
    assert np.abs(logits - expected).max() <= TOLERANCE
    assert expected.std() > 1  # a trained model's, not noise


@pytest.mark.parametrize("i", range(3))
def test_the_nextn_layer_computes_what_pytorch_computes(llama: Llama, i: int) -> None:
    with np.load(GOLDEN) as golden:
        text, expected = str(golden[f"text{i}"]), golden[f"draft{i}"]
    logits = llama.draft_logits(llama.tokenize(text))[-len(expected) :]
    assert np.abs(logits - expected).max() <= TOLERANCE


def test_how_a_prompt_is_cut_into_batches_changes_nothing(shards: list[Path], llama: Llama) -> None:
    with np.load(GOLDEN) as golden:
        tokens = llama.tokenize(str(golden["text2"]))
    with Llama(shards[0], cache="f16", flash_attention=False, n_ctx=1024) as whole:
        expected = whole.logits(tokens)
    with Llama(shards[0], cache="f16", flash_attention=False, n_ctx=1024, n_ubatch=32) as cut:
        assert np.abs(cut.logits(tokens) - expected).max() <= TOLERANCE
