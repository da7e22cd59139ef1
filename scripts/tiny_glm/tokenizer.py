"""A byte-level BPE vocabulary in GLM's manner: the pre-tokenizer that llama.cpp calls glm4, and GLM's special tokens.

Texts are cut at special tokens, then into words by WORD, then bytes are merged pair by pair, in the order in which
the merges were learnt. Three rules keep the small vocabulary tidy:

* No merge crosses a character that is not ASCII, so every Chinese character is at most one token of its own.
* `<`, `>`, `|` and `[` never merge, so text that looks like a tag is cut the same way wherever it stands.
* Words are learnt without their leading blank; the merges that join a blank and a whole word come last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from scripts.tiny_glm.corpus import SHIELD

# GLM's control tokens: invisible to a text tokenizer unless special tokens are parsed.
CONTROL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
)  # fmt: skip

# Single tokens too, but not marked special by GLM: llama.cpp calls them user-defined and always finds and shows them.
TAG_TOKENS = (
    "/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip

# The glm4 pre-tokenizer, for texts without combining marks: [^\W\d_] stands for a letter, \d for a number.
WORD = re.compile(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    r"|(?:[^\r\n\w]|_)?[^\W\d_]+"
    r"|\d{1,3}"
    r"| ?(?:[^\s\w]|_)+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONE = re.compile(rb"[<>|\[]|[\x80-\xff]")  # bytes that a merge may not join with other characters
DIGIT = re.compile(rb"[0-9]")

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Vocabulary:
    """Token ids are positions: 256 bytes, then the merged tokens, then tags, then control tokens."""

    merges: list[Pair]
    ids: dict[bytes, int] = field(init=False)  # ordinary tokens
    special_ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        ordinary = [bytes([value]) for value in range(256)] + [left + right for left, right in self.merges]
        specials = TAG_TOKENS + CONTROL_TOKENS
        object.__setattr__(self, "ids", {token: i for i, token in enumerate(ordinary)})
        object.__setattr__(self, "special_ids", {text: len(ordinary) + i for i, text in enumerate(specials)})

    def __len__(self) -> int:
        return len(self.ids) + len(self.special_ids)


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ranks = {pair: rank for rank, pair in enumerate(vocabulary.merges)}
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text are parsed; a SHIELD inside a tag's text makes it ordinary text."""
        ids = []
        for piece in _split_at_specials(text):
            special = self.vocabulary.special_ids.get(piece)
            if special is not None:
                ids.append(special)
                continue
            for part in piece.split(SHIELD):
                for word in WORD.findall(part):
                    ids.extend(self._encode_word(word))
        return ids

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._words:
            whole = self.vocabulary.ids.get(word.encode())
            parts = [word.encode()] if whole is not None else merge(split_bytes(word.encode()), self._ranks)
            self._words[word] = [self.vocabulary.ids[part] for part in parts]
        return self._words[word]


def merge(parts: list[bytes], ranks: dict[Pair, int]) -> list[bytes]:
    """Join the pair with the lowest rank, leftmost first, until none is left."""
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), len(ranks)))
        if (parts[best], parts[best + 1]) not in ranks:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def split_bytes(text: bytes) -> list[bytes]:
    return [bytes([value]) for value in text]


def learn(
    texts: Iterable[str], *, n_word_merges: int = 700, n_blank_merges: int = 200, min_count: int = 5
) -> Vocabulary:
    """Count the words of the texts, then learn merges from the most frequent pairs on."""
    counts: Counter[str] = Counter()
    for text in texts:
        for piece in _split_at_specials(text):
            if piece not in TAG_TOKENS and piece not in CONTROL_TOKENS:
                counts.update(word for part in piece.split(SHIELD) for word in WORD.findall(part))

    chunks: Counter[bytes] = Counter()
    for word, count in counts.items():
        for chunk in _chunks(word):
            chunks[chunk] += count
    merges = _learn_pairs(chunks, n_word_merges, min_count)

    ranks = {pair: rank for rank, pair in enumerate(merges)}
    blank_words = Counter({word: count for word, count in counts.items() if re.fullmatch(r" [a-z]+", word)})
    for word, count in sorted(blank_words.items(), key=lambda item: (-item[1], item[0])):
        body = merge(split_bytes(word[1:].encode()), ranks)
        if n_blank_merges and count >= min_count and len(body) == 1:
            merges.append((b" ", body[0]))
            n_blank_merges -= 1
    return Vocabulary(merges)


def _learn_pairs(chunks: Counter[bytes], n_merges: int, min_count: int) -> list[Pair]:
    words = [(split_bytes(chunk), count) for chunk, count in sorted(chunks.items())]
    merges: list[Pair] = []
    while len(merges) < n_merges:
        pairs: Counter[Pair] = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                pairs[pair] += count
        if not pairs:
            break
        pair, count = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        if count < min_count:
            break
        merges.append(pair)
        for parts, _ in words:
            _apply(parts, pair)
    return merges


def _apply(parts: list[bytes], pair: Pair) -> None:
    i = 0
    while i < len(parts) - 1:
        if (parts[i], parts[i + 1]) == pair:
            parts[i : i + 2] = [pair[0] + pair[1]]
        i += 1


def _chunks(word: str) -> list[bytes]:
    """The stretches of a word inside which merges may be learnt."""
    if re.fullmatch(r" [^\W\d_]+", word):
        word = word[1:]
    chunks = [b""]
    for character in word:
        data = character.encode()
        if DIGIT.match(data):
            chunks.append(b"")  # digits stay single
        elif LONE.match(data):
            chunks += [data, b""]
        else:
            chunks[-1] += data
    return [chunk for chunk in chunks if len(chunk) > 1]


_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in CONTROL_TOKENS + TAG_TOKENS) + ")")


def _split_at_specials(text: str) -> list[str]:
    return [piece for piece in _SPECIAL.split(text) if piece]
