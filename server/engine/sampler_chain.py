"""Building llama.cpp's sampler chains: the order of its `common/sampling.cpp`, its checks, its grammar parser."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from server.engine.messages import SamplingOptions
from server.engine.vocabulary import Vocabulary
from server.errors import InvalidRequest

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED
_MIROSTAT_M = 100  # common/sampling.cpp
_STDERR = 2
_LONGEST_COMPLAINT = 200  # characters
_MAX_GRAMMAR_BYTES = 128 << 10
_MAX_GRAMMAR_NESTING = 1000
_GRAMMAR_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
_SAMPLERS = frozenset(
    {"penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "infill"}
    | {"adaptive_p"}
)


@dataclass(frozen=True, slots=True)
class SamplerSource:
    """What every chain of one context needs."""

    bindings: ModuleType
    context: int
    vocabulary: Vocabulary
    n_ctx: int  # tokens that "the whole context" means for penalties
    read_row: Any  # llama_get_logits_ith, returning an address
    outputs: NDArray[np.int8]  # the batch's flags: which rows have logits

    def logits(self, row: int) -> NDArray[np.float32]:
        """View of the logits of a batch row, shape [n_vocab]; valid until the next decode."""
        self.require(row)
        address = self.read_row(self.context, row)
        return np.frombuffer(
            memoryview((ctypes.c_float * self.vocabulary.n_tokens).from_address(address)), dtype=np.float32
        )

    def require(self, row: int) -> None:
        """llama.cpp aborts the process over a row without logits."""
        if not self.outputs[row]:
            raise IndexError(f"batch row {row} has no logits; ask for them with Logits.LAST or Logits.ALL")


# ── building the chain ───────────────────────────────────────────────────────────────────────────────────────────────


def check(options: SamplingOptions, vocabulary: Vocabulary) -> None:
    if not (math.isfinite(options.repeat_penalty) and options.repeat_penalty > 0.0):
        raise InvalidRequest("repeat_penalty must be finite and greater than 0", param="repeat_penalty")
    for name in ("frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(options, name)):
            raise InvalidRequest(f"{name} must be finite", param=name)
    if options.mirostat not in (0, 1, 2):
        raise InvalidRequest(f"mirostat must be 0, 1 or 2, but is {options.mirostat}", param="mirostat")
    unknown = [name for name in options.samplers if name not in _SAMPLERS]
    if unknown:
        raise InvalidRequest(
            f"the sampler '{unknown[0]}' is not known; use any of: {', '.join(sorted(_SAMPLERS))}", param="samplers"
        )
    for token, _ in options.logit_bias:
        if not 0 <= token < vocabulary.n_tokens:
            raise InvalidRequest(
                f"logit_bias names the token {token}, but this model has tokens 0 to {vocabulary.n_tokens - 1}",
                param="logit_bias",
            )


def biases(options: SamplingOptions, vocabulary: Vocabulary) -> list[tuple[int, float]]:
    biases = list(options.logit_bias)
    if options.ignore_eos:
        biases += [(token, -math.inf) for token in sorted(vocabulary.end_tokens)]
    biases += [(token, -math.inf) for token in vocabulary.suppressed()]
    return biases


def is_argmax(options: SamplingOptions) -> bool:
    """Does the chain always choose the likeliest token? Truncating samplers keep it; typical_p, XTC, penalties, DRY,
    dynamic temperature and mirostat may not; without "temperature" in the chain 0 has no effect."""
    used = set(options.samplers)
    return (
        options.temperature <= 0.0
        and "temperature" in used
        and options.mirostat == 0
        and not options.grammar
        and options.dynatemp_range <= 0.0
        and not ({"infill", "adaptive_p"} & used)
        and not ("typ_p" in used and options.typical_p < 1.0)
        and not ("xtc" in used and options.xtc_probability > 0.0)
        and not ("penalties" in used and _penalizes(options))
        and not ("dry" in used and options.dry_multiplier != 0.0)
        and not ("min_p" in used and options.min_p > 1.0)
    )


def _penalizes(options: SamplingOptions) -> bool:
    neutral = (options.repeat_penalty, options.frequency_penalty, options.presence_penalty) == (1.0, 0.0, 0.0)
    return options.repeat_last_n != 0 and not neutral


def penalty_window(source: SamplerSource, options: SamplingOptions) -> int:
    if options.mirostat or "penalties" not in options.samplers or not _penalizes(options):
        return 0
    return source.n_ctx if options.repeat_last_n < 0 else options.repeat_last_n


def dry_window(source: SamplerSource, options: SamplingOptions) -> int:
    if options.mirostat or "dry" not in options.samplers or options.dry_multiplier == 0.0:
        return 0
    return source.n_ctx if options.dry_penalty_last_n < 0 else options.dry_penalty_last_n


def remembers(source: SamplerSource, options: SamplingOptions) -> bool:
    """Does it matter to the chain which tokens it is told of, or how often it is asked?"""
    windows = penalty_window(source, options) + dry_window(source, options)
    return windows > 0 or options.mirostat != 0 or "adaptive_p" in options.samplers


def build_chain(source: SamplerSource, options: SamplingOptions, biases: list[tuple[int, float]]) -> int:
    bindings, vocabulary = source.bindings, source.vocabulary
    seed = _RANDOM_SEED if options.seed < 0 else options.seed & 0xFFFFFFFF
    links: list[int] = []
    if biases:
        rows = (bindings.llama_logit_bias * len(biases))(*biases)
        links.append(bindings.llama_sampler_init_logit_bias(vocabulary.n_tokens, len(biases), rows))
    if options.mirostat:
        links.append(bindings.llama_sampler_init_temp(options.temperature))
        tau, eta = options.mirostat_tau, options.mirostat_eta
        if options.mirostat == 1:
            links.append(bindings.llama_sampler_init_mirostat(vocabulary.n_tokens, seed, tau, eta, _MIROSTAT_M))
        else:
            links.append(bindings.llama_sampler_init_mirostat_v2(seed, tau, eta))
    else:
        links += [_link(source, options, name, seed) for name in options.samplers if name != "adaptive_p"]
        if "adaptive_p" in options.samplers:  # chooses the token itself, so it stands last whatever its place
            target, decay = options.adaptive_target, options.adaptive_decay
            links.append(bindings.llama_sampler_init_adaptive_p(target, decay, seed))
        else:
            links.append(bindings.llama_sampler_init_dist(seed))
    chain: int = bindings.llama_sampler_chain_init(bindings.llama_sampler_chain_default_params())
    for link in links:
        bindings.llama_sampler_chain_add(chain, link)
    return chain


def _link(source: SamplerSource, options: SamplingOptions, name: str, seed: int) -> int:
    """One sampler by its name in llama.cpp. Neutral parameters give llama.cpp's own empty sampler."""
    bindings, keep = source.bindings, options.min_keep
    link: int
    match name:
        case "penalties":
            link = bindings.llama_sampler_init_penalties(
                source.vocabulary.n_tokens,
                penalty_window(source, options),
                options.repeat_penalty,
                options.frequency_penalty,
                options.presence_penalty,
            )
        case "dry":
            link = _dry(source, options)
        case "top_n_sigma":
            link = bindings.llama_sampler_init_top_n_sigma(options.top_n_sigma)
        case "top_k":
            link = bindings.llama_sampler_init_top_k(options.top_k)
        case "typ_p":
            link = bindings.llama_sampler_init_typical(options.typical_p, keep)
        case "top_p":
            link = bindings.llama_sampler_init_top_p(options.top_p, keep)
        case "min_p":
            link = bindings.llama_sampler_init_min_p(options.min_p, keep)
        case "xtc":
            link = bindings.llama_sampler_init_xtc(options.xtc_probability, options.xtc_threshold, keep, seed)
        case "temperature":
            link = bindings.llama_sampler_init_temp_ext(
                options.temperature, options.dynatemp_range, options.dynatemp_exponent
            )
        case _:  # check() has let no other name pass
            link = bindings.llama_sampler_init_infill(source.vocabulary.handle)
    return link


def _dry(source: SamplerSource, options: SamplingOptions) -> int:
    breakers = [text.encode("utf-8", errors="replace") for text in options.dry_sequence_breakers]
    texts = (ctypes.c_char_p * len(breakers))(*breakers)
    link: int = source.bindings.llama_sampler_init_dry(
        source.vocabulary.handle,
        options.dry_multiplier,
        options.dry_base,
        options.dry_allowed_length,
        dry_window(source, options),
        texts,
        len(breakers),
    )
    return link


# ── grammar ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_grammar(source: SamplerSource, grammar: str) -> int:
    """Raises InvalidRequest with the parser's own words; a grammar is never dropped silently."""
    if grammar.startswith("%llguidance"):
        raise InvalidRequest("this build reads GBNF grammars only; %llguidance is not compiled in", param="grammar")
    text = grammar.encode("utf-8", errors="replace")
    _check_grammar_size(grammar, len(text))
    # the parser prints its complaint, and the whole grammar, straight to stderr
    with _captured_stderr() as captured:
        sampler: int | None = source.bindings.llama_sampler_init_grammar(source.vocabulary.handle, text, b"root")
        captured.seek(0)
        said = captured.read().decode("utf-8", errors="replace")
    if sampler:
        return sampler
    raise InvalidRequest(f"the grammar cannot be used: {_complaint(said)}", param="grammar")


def _check_grammar_size(grammar: str, n_bytes: int) -> None:
    """llama.cpp's parser recurses per parenthesis and per rule, and is quadratic in alternatives: a monstrous grammar
    would overflow the stack of this process or hold up every other request."""
    if n_bytes > _MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the grammar has {n_bytes:,} bytes; at most {_MAX_GRAMMAR_BYTES:,} are possible", param="grammar"
        )
    if grammar.count("(") > _MAX_GRAMMAR_NESTING:
        depth = deepest = 0
        for char in _GRAMMAR_LITERAL.sub("", grammar):
            depth += (char == "(") - (char == ")")
            deepest = max(deepest, depth)
        if deepest > _MAX_GRAMMAR_NESTING:
            raise InvalidRequest(
                f"the grammar nests {deepest:,} parentheses; at most {_MAX_GRAMMAR_NESTING:,} are possible",
                param="grammar",
            )


def _complaint(said: str) -> str:
    """First line of what the parser said; the grammar that it repeats is cut off."""
    _, found, rest = said.partition("error parsing grammar: ")
    first_line = (rest if found else said).strip().partition("\n")[0]
    return first_line[:_LONGEST_COMPLAINT] or "llama.cpp gave no reason"


@contextlib.contextmanager
def _captured_stderr() -> Iterator[IO[bytes]]:
    """Sends what native code writes to stderr into a file."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(_STDERR)
        try:
            os.dup2(file.fileno(), _STDERR)
            yield file
        finally:
            os.dup2(saved, _STDERR)
            os.close(saved)
