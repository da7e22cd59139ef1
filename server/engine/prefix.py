"""How much of a prompt is already in the cache, and where.

The engine asks one question, `longest_match`. Today it is answered by comparing with every sequence that the slots
hold; a structure that knows more sequences than slots can take its place without the engine noticing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """The first `n_tokens` of the prompt are held by `sequence`."""

    sequence: int
    n_tokens: int


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix. Compares slices, so that the work is done in C."""
    n = min(len(a), len(b))
    low, width = 0, 64
    while low < n and a[low : low + width] == b[low : low + width]:
        low += width
        width *= 2
    high = min(low + width, n)
    # Everything before `low` is equal; the first difference, if any, lies before `high`.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return min(low, n)


def longest_match(prompt: Sequence[int], sequences: Iterable[tuple[int, Sequence[int]]]) -> Match | None:
    """The sequence with the longest common prefix; the first of equals. None when nothing matches.

    `sequences` are (sequence id, tokens it holds).
    """
    best: Match | None = None
    for sequence, tokens in sequences:
        n = common_length(prompt, tokens)
        if n > (best.n_tokens if best else 0):
            best = Match(sequence, n)
    return best
