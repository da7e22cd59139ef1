"""Vocabularies for constraints without a model: bytes as tokens, and a large synthetic one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from server.engine.constraint import TokenTable

GLM_TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")


class _Tokenizer:
    """What llguidance asks of a tokenizer: here every byte of a text is a token."""

    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.eos_token_id = min(table.end_tokens)
        self.tokens = list(table.pieces)
        self.special_token_ids = sorted(table.special)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def make(table: TokenTable) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Tokenizer(table)), eos_token=sorted(table.end_tokens))


def byte_table(special: Mapping[str, int], ends: Mapping[int, str]) -> TokenTable:
    """256 bytes and the special tokens, which must follow them without a gap."""
    names = {token: text for text, token in special.items()} | dict(ends)
    pieces = [bytes([value]) for value in range(256)] + [names[token].encode() for token in sorted(names)]
    return TokenTable(pieces, frozenset(names), frozenset(ends), make)


def glm_table(words: Sequence[bytes] = ()) -> TokenTable:
    """Bytes, words, then GLM's tags and end tokens."""
    pieces = [*(bytes([value]) for value in range(256)), *words]
    names = [*GLM_TAGS, *GLM_ENDS]
    special = range(len(pieces), len(pieces) + len(names))
    pieces += [name.encode() for name in names]
    return TokenTable(pieces, frozenset(special), frozenset(special[-len(GLM_ENDS) :]), make)


def synthetic_words(n: int, seed: int = 0) -> list[bytes]:
    """Distinct words as large vocabularies have them: Latin with and without a blank, Chinese, digits, punctuation."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [1 / (i + 1) for i in range(len(letters))]
    signs = ['":', '", "', '"}', "],", "</", "/>", "\n\n", "    ", "():", "->", "==", "12", "123", "0.", '["']
    words = dict.fromkeys(sign.encode() for sign in signs)
    while len(words) < n:
        word = "".join(draw.choices(letters, weights, k=draw.randint(2, 9)))
        match draw.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                word = " " + word
            case 5:
                word = word.capitalize()
            case 6 | 7:
                word = "".join(chr(draw.randint(0x4E00, 0x9FA5)) for _ in range(draw.randint(2, 4)))
            case 8:
                word += draw.choice(signs)
            case _:
                pass
        words[word.encode()] = None
    return list(words)[:n]
