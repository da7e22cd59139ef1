"""The seam between the step loop and llama.cpp. `LlamaBackend` is the real one; tests/support has a scripted one.

One thread uses a backend. The only exceptions are the vocabulary questions (`tokenize`, `detokenize`, `piece`,
`is_end`, `prepare`): they read constant data and may be asked from other threads while a decode runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from server.engine.messages import Constraint, Job, ModelFacts, Span, TokenLogprob

State = NDArray[np.uint8]


class Logits(Enum):
    """Which rows of a piece yield logits."""

    NONE = auto()
    LAST = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens of one sequence at consecutive positions, `start` on."""

    sequence: int
    start: int
    tokens: list[int]
    logits: Logits


class DecodeStatus(Enum):
    OK = auto()
    NO_ROOM = auto()  # llama_decode 1: nothing was stored; free cells or send less
    ABORTED = auto()  # llama_decode 2
    FAILED = auto()  # < 0: the batch is invalid or the computation failed


class Sampler(Protocol):
    """The chain of one job. Rows are indices into the last decoded batch's tokens."""

    def sample(self, row: int) -> int:
        """Choose and accept the next token from the logits of `row`."""
        ...

    def force(self, row: int, token: int) -> None:
        """Accept a token in place of one sampled from `row`. Not for a job with a grammar, which might not allow it."""
        ...

    def logprobs(self, row: int, token: int, n_top: int) -> TokenLogprob:
        """Log-probability of `token`, just sampled from `row`, and the `n_top` likeliest tokens."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    @property
    def facts(self) -> ModelFacts: ...

    # vocabulary: constant, callable from any thread
    def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]: ...
    def detokenize(self, tokens: list[int], *, show_special: bool) -> str: ...
    def piece(self, token: int, *, show_special: bool) -> bytes: ...
    def is_end(self, token: int) -> bool: ...
    def is_control(self, token: int) -> bool: ...

    def warm_up_constraints(self) -> None:
        """Do what the first `prepare` would have to do."""
        ...

    def prepare(self, constraint: Constraint) -> tuple[str, ...]:
        """Compile a constraint, so that `sampler` will not have to: what of it is not enforced. Raises InvalidRequest,
        with the reason, when it cannot be used."""
        ...

    # one step
    def decode(self, pieces: list[Piece]) -> DecodeStatus:
        """Run one batch; at most n_batch tokens in all. Row i of the batch is the i-th token of the joined pieces."""
        ...

    def sampler(self, job: Job) -> Sampler:
        """Build the chain of a job and feed it the prompt (penalties and DRY look back at it).
        Raises InvalidRequest, with the reason, when the grammar or an option cannot be used."""
        ...

    # the cache, by sequence id (0 .. n_sequences - 1)
    def keep(self, sequence: int, n_tokens: int) -> bool:
        """Drop all positions from `n_tokens` on. False: the memory cannot roll back partially, nothing was dropped."""
        ...

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Make `target` (cleared first) hold the first `n_tokens` of `source`. False: not possible in this cache."""
        ...

    def length(self, sequence: int) -> int:
        """Tokens the memory really holds for a sequence (last position + 1)."""
        ...

    def save(self, sequence: int, start: int, max_bytes: int) -> State | None:
        """The state of a sequence's positions from `start` on, copied out of the cache. `start` is above 0 only in a
        unified cache that can be cut. None: it has more than `max_bytes`, or llama.cpp gave nothing."""
        ...

    def is_settled(self, sequence: int) -> bool:
        """False: a copy to or from it is still to be made by the next decode; its state can be neither read nor set."""
        ...

    def restore(self, sequence: int, state: State, start: int, end: int) -> bool:
        """Give `sequence`, which holds exactly `start` tokens, those up to `end` from a state of `save`. False: it does
        not fit or is not taken; the sequence then holds `start` tokens as before, or none where `start` is 0."""
        ...

    def warm_up(self) -> None:
        """Decode once at full width, then clear the memory. Raises LoadError when it does not fit."""
        ...

    def close(self) -> None: ...
