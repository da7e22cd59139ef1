"""Choosing the next token: llama.cpp's samplers, chained exactly as its `common/sampling.cpp` chains them.

The same seed, prompt and options give the same tokens as llama.cpp's server. Logits stay in llama.cpp's buffer: the
plain path is one native call, the greedy path one argmax over a view. Only grammars and post-sampling probabilities
need the candidate list, which is filled by numpy and never walked by Python.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine import sampler_chain as chains
from server.engine.messages import Job, TokenLogprob, TopToken
from server.engine.sampler_chain import SamplerSource
from server.errors import InvalidRequest

_BLOCK = 256
_LOWEST = -3.4028234663852886e38  # llama.cpp's logarithm of 0, which JSON can carry
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # struct llama_token_data


class LlamaSampler:
    """The chain of one job. Owns native objects; `close` frees them."""

    def __init__(self, source: SamplerSource, job: Job) -> None:
        options = job.sampling
        chains.check(options, source.vocabulary)
        self._source = source
        self._show_special = job.show_special
        self._post_probs = job.post_sampling_probs and job.n_logprobs is not None
        self._bias = chains.biases(options, source.vocabulary)
        self._biased = frozenset(token for token, _ in self._bias)
        self._raises = any(bias > 0.0 for _, bias in self._bias)
        self._greedy = not self._post_probs and chains.is_argmax(options)
        self._remembers = chains.remembers(source, options)
        self._chain: int | None = None
        self._grammar: int | None = None
        self.uses_grammar = True  # False while the text is free of it
        self._candidates: NDArray[Any] | None = None
        self._current = source.bindings.llama_token_data_array()
        self._sample = source.bindings.llama_sampler_sample
        if self._greedy:
            return
        if options.grammar:
            self._grammar = chains.parse_grammar(source, options.grammar)
        self._chain = chains.build_chain(source, options, self._bias)
        self._look_back(job)

    def _look_back(self, job: Job) -> None:
        """Penalties and DRY remember a window of tokens; what lies before it would be pushed out again."""
        window = max(chains.penalty_window(self._source, job.sampling), chains.dry_window(self._source, job.sampling))
        accept, chain = self._source.bindings.llama_sampler_accept, self._chain
        for token in job.tokens[-window:] if window > 0 else ():
            accept(chain, token)

    def sample(self, row: int) -> int:
        """Raises InvalidRequest when the grammar allows no token any more."""
        if self._greedy:
            return self._argmax(row)
        if (self._grammar is None or not self.uses_grammar) and not self._post_probs:
            return self._sample_plainly(row)
        return self._sample_candidates(row)

    def _argmax(self, row: int) -> int:
        """What the chain would choose, without its list of all candidates, which is three times as large as the
        logits and has to be written first."""
        token = int(self._source.logits(row).argmax())
        # Biases that only lower others than the likeliest token change nothing.
        if self._bias and (token in self._biased or self._raises):
            token = int(self._biased_logits(row).argmax())
        return token

    def _biased_logits(self, row: int) -> NDArray[np.float32]:
        logits = self._source.logits(row)
        if self._bias:
            logits = logits.copy()
            for token, bias in self._bias:
                logits[token] += bias
        return logits

    def _sample_plainly(self, row: int) -> int:
        self._source.require(row)
        token: int = self._sample(self._chain, self._source.context, row)
        return token

    # ── for those who may want another token: propose, perhaps choose_among, then take ───────────────────────────────

    def propose(self, row: int) -> int:
        """What `sample` would choose, not accepted yet: a chain that remembers its tokens has not been told."""
        if self._greedy:
            return self._argmax(row)
        if self._remembers or self._post_probs:
            return self._choose(row)
        return self._sample_plainly(row)

    def choose_among(self, row: int, allowed: NDArray[np.bool_]) -> int:
        """Sample anew, from the tokens that are allowed only. Raises InvalidRequest when there are none, or when the
        options ban them all."""
        tokens = np.flatnonzero(allowed[: self._source.vocabulary.n_tokens])
        if len(tokens) and self._greedy:
            logits = self._biased_logits(row)[tokens]
            best = int(logits.argmax())
            if logits[best] != -math.inf:
                return int(tokens[best])
        elif len(tokens):
            token = self._choose(row, among=tokens)
            if self._current.data[self._current.selected].logit != -math.inf:
                return token
        raise InvalidRequest(
            "the constraint allows no token of this model here; change it, or the options that ban tokens (logit_bias)"
        )

    def take(self, token: int) -> None:
        if self._chain is not None and (self._remembers or self._post_probs):
            self._source.bindings.llama_sampler_accept(self._chain, token)

    def force(self, row: int, token: int) -> None:
        if self._post_probs:
            self._choose(row)  # what would have been left, for those who asked
        if self._chain is not None:
            self._source.bindings.llama_sampler_accept(self._chain, token)

    # ── grammar and post-sampling probabilities ──────────────────────────────────────────────────────────────────────

    def _sample_candidates(self, row: int) -> int:
        """llama.cpp's rejection scheme: the grammar sees the whole vocabulary only when it refuses the first choice."""
        bindings = self._source.bindings
        token = self._choose(row)
        if self._grammar is not None and self.uses_grammar:
            if not self._grammar_allows(token):
                token = self._choose(row, by_grammar=True)
                if not self._grammar_allows(token):  # accepting it would abort the process
                    raise InvalidRequest(
                        "the grammar allows no token of this model here; change the grammar, or the options that ban "
                        "tokens (logit_bias, ignore_eos)",
                        param="grammar",
                    )
            bindings.llama_sampler_accept(self._grammar, token)
        bindings.llama_sampler_accept(self._chain, token)
        return token

    def _choose(self, row: int, *, by_grammar: bool = False, among: NDArray[np.intp] | None = None) -> int:
        """Let the chain choose from all tokens, or those in `among`."""
        bindings, current = self._source.bindings, self._current
        candidates = self._candidates
        if candidates is None:
            candidates = self._candidates = np.zeros(self._source.vocabulary.n_tokens, dtype=_CANDIDATE)
        logits = self._source.logits(row)
        if among is not None:
            candidates = candidates[: len(among)]
        candidates["id"] = np.arange(len(candidates), dtype=np.int32) if among is None else among  # samplers reorder it
        candidates["logit"] = logits if among is None else logits[among]
        candidates["p"] = 0.0
        current.data = ctypes.cast(candidates.ctypes.data, type(current.data))
        current.size, current.selected, current.sorted = len(candidates), -1, False
        if by_grammar:
            bindings.llama_sampler_apply(self._grammar, ctypes.byref(current))
        bindings.llama_sampler_apply(self._chain, ctypes.byref(current))
        token: int = current.data[current.selected].id
        return token

    def _grammar_allows(self, token: int) -> bool:
        bindings = self._source.bindings
        single = bindings.llama_token_data(id=token, logit=1.0, p=0.0)
        array = bindings.llama_token_data_array(data=ctypes.pointer(single), size=1, selected=-1, sorted=False)
        bindings.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return bool(single.logit != -math.inf)

    # ── probabilities ────────────────────────────────────────────────────────────────────────────────────────────────

    def logprobs(self, row: int, token: int, n_top: int) -> TokenLogprob:
        if self._post_probs:
            return self._post_sampling(token, n_top)
        logits = self._source.logits(row)
        highest = float(logits.max())
        total = highest + math.log(np.exp(logits - highest).sum(dtype=np.float64))
        top = [
            TopToken(int(index), self._piece(int(index)), _finite(float(logits[index]) - total))
            for index in (_largest(logits, n_top) if n_top > 0 else ())
        ]
        return TokenLogprob(token, self._piece(token), _finite(float(logits[token]) - total), top)

    def _post_sampling(self, token: int, n_top: int) -> TokenLogprob:
        """Probabilities, not logarithms, of the candidates that the chain left; zero ones are not listed."""
        current = self._current
        data = (ctypes.c_char * (current.size * _CANDIDATE.itemsize)).from_address(
            ctypes.addressof(current.data.contents)
        )
        left = np.frombuffer(data, dtype=_CANDIDATE)
        chosen = left["p"][left["id"] == token]
        top = [
            TopToken(int(left["id"][index]), self._piece(int(left["id"][index])), float(left["p"][index]))
            for index in (_largest(left["p"], n_top) if n_top > 0 else ())
            if left["p"][index] > 0.0
        ]
        return TokenLogprob(token, self._piece(token), float(chosen[0]) if len(chosen) else 0.0, top)

    def _piece(self, token: int) -> bytes:
        return self._source.vocabulary.piece(token, show_special=self._show_special)

    def close(self) -> None:
        """Free the native chain; the sampler is unusable afterwards. May be called twice."""
        for sampler in (self._chain, self._grammar):
            if sampler is not None:
                self._source.bindings.llama_sampler_free(sampler)
        self._chain = self._grammar = None


def _largest(values: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Indices of the `n` largest values, largest first. Selecting among all is slow (0.7 ms for 50,000), so blocks that
    cannot hold one of them are passed over: `n` block maxima reach the bound, hence so do the `n` largest."""
    n = min(n, len(values))
    n_blocks = len(values) // _BLOCK
    if n <= n_blocks:
        maxima = values[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
        indices = np.flatnonzero(values >= np.partition(maxima, n_blocks - n)[n_blocks - n])
    else:
        indices = np.arange(len(values))
    largest: NDArray[np.intp] = indices[np.argsort(-values[indices], kind="stable")][:n]
    return largest


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
