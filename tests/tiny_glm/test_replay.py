"""Every answer of every dialogue, decoded greedily and compared letter by letter, the end of the turn included.

Straight through llama.cpp; test_server_replay.py does the same through the server, with the other cache types.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scripts.tiny_glm.corpus import Answer
from scripts.tiny_glm.llama import Llama

LONGEST_ANSWER = 600


def test_every_answer_comes_word_for_word(shards: list[Path], answers: list[Answer]) -> None:
    wrong = {}
    with Llama(shards[0], cache="f16", flash_attention=False, n_ctx=1280) as llama:
        for answer in answers:
            text = llama.text(llama.answer(llama.tokenize(answer.prompt), LONGEST_ANSWER))
            if text != answer.text:
                wrong[answer.dialogue] = (answer.text, text)
    assert wrong == {}


def test_a_prompt_beyond_the_indexers_reach_runs(shards: list[Path], answers: list[Answer]) -> None:
    """Beyond 2,048 cells attention is really sparse. With a random indexer the text means nothing, but it runs."""
    with Llama(shards[0], cache="q8_0", flash_attention=True, n_ctx=2560) as llama:
        story = "".join(answer.text for answer in answers)
        prompt = llama.tokenize("[gMASK]<sop><|user|>" + story)[:2300]
        assert len(prompt) == 2300
        assert np.isfinite(llama.logits(prompt)).all()
