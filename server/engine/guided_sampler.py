"""Sampling under a constraint: sample as always, and only where the constraint refuses the token sample again, from the
tokens it allows. That is llama.cpp's way with grammars. Where the model writes what it should, the mask is never
computed, and the same seed gives the same answer as without a constraint.
"""

from __future__ import annotations

from server.engine.guide import Guide
from server.engine.messages import FreeBlock, TokenLogprob
from server.engine.sampling import LlamaSampler


class GuidedSampler:
    """A chain whose job has a constraint."""

    def __init__(self, chain: LlamaSampler, guide: Guide) -> None:
        self._chain = chain
        self._guide = guide

    def sample(self, row: int) -> int:
        """Raises InvalidRequest when the constraint allows no token any more."""
        chain, guide = self._chain, self._guide
        token = guide.substitute(chain.propose(row))
        if guide.refuses(token):
            allowed = guide.allowed()
            token = chain.choose_among(row, allowed)
            while guide.forbids(token):
                allowed[token] = False
                token = chain.choose_among(row, allowed)
        chain.take(token)
        guide.note(token)
        return token

    def force(self, row: int, token: int) -> None:
        self._chain.force(row, token)
        self._guide.note(token)

    def logprobs(self, row: int, token: int, n_top: int) -> TokenLogprob:
        return self._chain.logprobs(row, token, n_top)

    def close(self) -> None:
        self._guide.close()
        self._chain.close()


class SparingSampler:
    """A chain with a grammar that looks away from the tokens of a block, in which no answer may end."""

    def __init__(self, chain: LlamaSampler, block: FreeBlock, end_tokens: frozenset[int]) -> None:
        self._chain = chain
        self._closer = block.closer
        self._end_tokens = end_tokens.union(block.enders)
        chain.uses_grammar = not block.is_open

    def sample(self, row: int) -> int:
        chain = self._chain
        if chain.uses_grammar:
            return chain.sample(row)
        token = chain.propose(row)
        if token in self._end_tokens:
            token = self._closer
        chain.take(token)
        self._note(token)
        return token

    def force(self, row: int, token: int) -> None:
        self._chain.force(row, token)
        self._note(token)

    def _note(self, token: int) -> None:
        if token == self._closer:
            self._chain.uses_grammar = True

    def logprobs(self, row: int, token: int, n_top: int) -> TokenLogprob:
        return self._chain.logprobs(row, token, n_top)

    def close(self) -> None:
        self._chain.close()
