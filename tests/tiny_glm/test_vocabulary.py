"""The vocabulary as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tiny_glm.corpus import SHIELD, Answer
from scripts.tiny_glm.llama import Llama
from scripts.tiny_glm.tokenizer import CONTROL_TOKENS, TAG_TOKENS, Tokenizer, learn


@pytest.fixture(scope="module")
def llama(shards: list[Path]) -> Iterator[Llama]:
    with Llama(shards[0], cache="f16", flash_attention=False, n_ctx=256) as llama:
        yield llama


def test_every_special_token_is_one_token(llama: Llama) -> None:
    for text in CONTROL_TOKENS + TAG_TOKENS:
        assert len(llama.tokenize(text)) == 1, text


def test_three_tokens_end_a_turn(llama: Llama) -> None:
    ends = {text for text in CONTROL_TOKENS + TAG_TOKENS if llama.is_end(llama.tokenize(text)[0])}
    assert ends == {"<|endoftext|>", "<|user|>", "<|observation|>"}


def test_control_tokens_can_be_text_but_tags_are_always_tokens(llama: Llama) -> None:
    """As in GLM's own vocabulary: whoever must keep `<think>` in a message from acting has to cut it in two."""
    assert len(llama.tokenize("<|user|>", parse_special=False)) > 1
    assert len(llama.tokenize("<think>", parse_special=False)) == 1
    assert llama.tokenize("<|user|>", parse_special=False) == llama.tokenize("<") + llama.tokenize("|user|>")


def test_digits_are_single_and_chinese_characters_do_not_merge(llama: Llama) -> None:
    assert [llama.piece(token) for token in llama.tokenize("2048")] == [b"2", b"0", b"4", b"8"]
    assert [llama.piece(token).decode() for token in llama.tokenize("北京的天气")] == list("北京的天气")


def test_any_text_survives(llama: Llama) -> None:
    for text in ("naïve café 🦙", "  two\n\n\tthree ", "ключ", "𝔘𝔫𝔦", "a\u0301", "<|unknown|>"):
        assert llama.text(llama.tokenize(text)) == text


def test_every_dialogue_survives_and_is_short_in_tokens(llama: Llama, answers: list[Answer]) -> None:
    n_characters = n_tokens = 0
    for answer in answers:
        tokens = llama.tokenize(answer.text)
        assert llama.text(tokens) == answer.text
        n_characters += len(answer.text)
        n_tokens += len(tokens)
    assert n_characters > 2.5 * n_tokens


def test_the_workshop_learns_the_shipped_vocabulary_and_cuts_as_llama_cpp_does(
    llama: Llama, answers: list[Answer]
) -> None:
    texts = [answer.prompt + answer.text for answer in answers]
    vocabulary = learn(texts)
    assert len(vocabulary) == llama.n_vocab
    assert [llama.piece(i) for i in vocabulary.ids.values()] == list(vocabulary.ids)
    tokenizer = Tokenizer(vocabulary)
    for text in texts:
        assert tokenizer.encode(text) == llama.tokenize(text)
    assert tokenizer.encode(f"a <{SHIELD}think> b") == llama.tokenize("a <") + llama.tokenize("think> b")
