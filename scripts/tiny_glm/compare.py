"""Is the file the model that was trained? Logits against PyTorch, and every answer replayed word for word."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from scripts.tiny_glm.corpus import Answer
from scripts.tiny_glm.llama import Llama
from scripts.tiny_glm.model import TinyGlm
from scripts.tiny_glm.tokenizer import Tokenizer
from scripts.tiny_glm.unquantized import write_unquantized

GOLDEN_DIALOGUES = ("operator-01", "chinese-02", "parallel-02")
GOLDEN_ROWS = 4  # the last ones of each text, enough to see every layer at work
LONGEST_ANSWER = 600


@dataclass(frozen=True, slots=True)
class Golden:
    """A text with PyTorch's logits after its last tokens, (GOLDEN_ROWS, V) each."""

    text: str
    trunk: NDArray[np.float32]
    draft: NDArray[np.float32]


@torch.no_grad()
def golden_logits(model: TinyGlm, tokenizer: Tokenizer, answers: Sequence[Answer]) -> list[Golden]:
    golden = []
    for name in GOLDEN_DIALOGUES:
        answer = next(answer for answer in answers if answer.dialogue == name)
        text = answer.prompt + answer.text
        tokens = torch.tensor([tokenizer.encode(text)])
        hidden = model.hidden(tokens)
        drafted = model.draft(tokens, hidden)
        trunk, draft = (model.logits(states[0, -GOLDEN_ROWS:]).numpy() for states in (hidden, drafted))
        golden.append(Golden(text, trunk, draft))
    return golden


def save_golden(golden: Sequence[Golden], path: Path) -> None:
    arrays: dict[str, NDArray[np.generic]] = {}
    for i, entry in enumerate(golden):
        arrays |= {f"text{i}": np.array(entry.text), f"trunk{i}": entry.trunk, f"draft{i}": entry.draft}
    np.savez_compressed(path, **arrays)


@torch.no_grad()
def largest_differences(
    model: TinyGlm, tokenizer: Tokenizer, answers: Sequence[Answer], shards: Sequence[Path]
) -> tuple[float, float]:
    """The largest difference between PyTorch's and llama.cpp's logits over all answers: trunk, draft."""
    trunk = draft = 0.0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "unquantized.gguf")
        write_unquantized(shards, copy)
        with Llama(copy, cache="f32", flash_attention=False, n_ctx=1024) as llama:
            for answer in answers:
                text = answer.prompt + answer.text
                ids = tokenizer.encode(text)
                if llama.tokenize(text) != ids:
                    raise RuntimeError(f"llama.cpp cuts the text of {answer.dialogue} into other tokens")
                tokens = torch.tensor([ids])
                hidden = model.hidden(tokens)
                ours, theirs = model.logits(hidden)[0].numpy(), llama.logits(ids)
                trunk = max(trunk, float(np.abs(ours - theirs).max()))
                ours, theirs = model.logits(model.draft(tokens, hidden))[0].numpy(), llama.draft_logits(ids)
                draft = max(draft, float(np.abs(ours - theirs).max()))
    return trunk, draft


def wrong_answers(
    answers: Sequence[Answer], first_shard: Path, *, cache: str, flash_attention: bool
) -> list[tuple[Answer, str]]:
    """Answers that llama.cpp's greedy decoding does not give exactly, with what it gives instead."""
    wrong = []
    with Llama(first_shard, cache=cache, flash_attention=flash_attention, n_ctx=1280) as llama:
        for answer in answers:
            text = llama.text(llama.answer(llama.tokenize(answer.prompt), LONGEST_ANSWER))
            if text != answer.text:
                wrong.append((answer, text))
    return wrong
