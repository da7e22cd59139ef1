"""Which slot gets how many rows of the next batch, and how many prompt tokens a step may carry.

Both are pure: `plan_step` maps numbers to numbers, `StepClock` is fed measurements and asked for a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reader:
    """A slot that still has `n_remaining` prompt tokens to read, in order of arrival."""

    slot: int
    n_remaining: int


@dataclass(frozen=True, slots=True)
class Share:
    slot: int
    n_tokens: int


# A long prompt keeps this part of an equal share whatever arrives behind it; the rest goes to the prompts that are
# done soonest, because finishing one prompt after the other has the shorter mean wait.
GUARANTEED_SHARE = 0.25


def plan_step(
    n_generating: int, readers: Sequence[Reader], n_batch: int, prompt_cap: int, turn: int = 0
) -> list[Share]:
    """Share what generating slots leave of a batch between the prompts.

    `n_generating` rows are taken first. The prompts get at most `prompt_cap` tokens together, at least one where
    the batch has room. Every reader advances by at least one token where the room allows it; with less room than
    readers they take turns, one token each: `turn` is the number of the step. Result: shares in order of arrival,
    none empty.
    """
    room = min(n_batch - n_generating, max(prompt_cap, 1))
    if room <= 0 or not readers:
        return []
    if room < len(readers):
        first = turn * room % len(readers)
        chosen = {(first + i) % len(readers) for i in range(room)}
        return [Share(reader.slot, 1) for i, reader in enumerate(readers) if i in chosen]
    floor = max(1, int(room / len(readers) * GUARANTEED_SHARE))
    given: dict[int, int] = {}
    for reader in readers:
        n = min(floor, reader.n_remaining, room)
        given[reader.slot] = n
        room -= n
    for reader in sorted(readers, key=lambda r: r.n_remaining):
        n = min(reader.n_remaining - given[reader.slot], room)
        given[reader.slot] += n
        room -= n
    return [Share(reader.slot, given[reader.slot]) for reader in readers if given[reader.slot] > 0]


class StepClock:
    """Sizes prompt chunks from the measured speed of earlier steps.

    While anybody generates, a step shall last `max_stall_ms`, but a quarter of that time is for prompts whatever the
    generating rows take: a prompt must come to its end. While nobody does, it may be a full batch, but no longer
    than `IDLE_STEP_MS`, so that a job that arrives meanwhile, or a client that leaves, does not wait for a whole batch
    on a slow machine; chunks are then whole micro-batches, which cost nothing in speed.
    """

    IDLE_STEP_MS = 2000.0
    FIRST_CHUNK = 32  # tokens, before anything was measured
    PROMPT_PART = 0.25  # of max_stall_ms, at least
    _WEIGHT = 0.5  # of the newest measurement
    # Attention kernels work on tiles of query rows (64 on the CPU; 64 and 128 are usual on GPUs), and a tile that is
    # not full costs as much as one that is: 48 rows were seen to take longer than 64. So chunks are whole tiles.
    _TILE_ROWS = 64
    _MIN_TILED_ROWS = 40  # below it a full tile would overrun the target by too much

    __slots__ = ("_added_ms", "_alone_ms", "_decode_ms", "_max_stall_ms", "_mixed_ms", "_n_batch", "_n_ubatch")

    def __init__(self, max_stall_ms: float, n_batch: int, n_ubatch: int) -> None:
        self._max_stall_ms = max_stall_ms
        self._n_batch = n_batch
        self._n_ubatch = min(n_ubatch, n_batch)
        self._alone_ms: float | None = None  # per prompt token in steps without generating rows
        self._mixed_ms: float | None = None  # per prompt token in steps with them, their cost included
        self._added_ms: float | None = None  # per prompt token in steps with them, without their cost
        self._decode_ms: float | None = None  # of a step with generating rows only

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured while nobody generated; 0 before the first prompt."""
        return 1e3 / self._alone_ms if self._alone_ms else 0.0

    def prompt_cap(self, n_generating: int) -> int:
        """Most prompt tokens for the next step, at least 1."""
        if n_generating == 0:
            if self._alone_ms is None:
                return self._n_ubatch
            n = self._tokens_within(self.IDLE_STEP_MS, self._alone_ms)
            return min(self._n_batch, max(n // self._n_ubatch, 1) * self._n_ubatch)
        if self._mixed_ms is not None:
            rows = self._tokens_within(self._max_stall_ms, self._mixed_ms) + n_generating
        elif self._alone_ms is not None:
            budget_ms = max(0.0, self._max_stall_ms - (self._decode_ms or 0.0))
            rows = self._tokens_within(budget_ms, self._alone_ms) + n_generating
        else:
            return self.FIRST_CHUNK
        if rows >= self._MIN_TILED_ROWS:
            rows = max(1, round(rows / self._TILE_ROWS)) * self._TILE_ROWS
        rows = max(rows, n_generating + self._guaranteed())
        return max(1, min(rows, self._n_batch) - n_generating)

    def _guaranteed(self) -> int:
        per_token_ms = self._alone_ms if self._alone_ms is not None else self._added_ms
        if per_token_ms is None:
            return 1
        return self._tokens_within(self.PROMPT_PART * self._max_stall_ms, per_token_ms)

    def measured(self, n_generating: int, n_prompt: int, step_ms: float) -> None:
        """Tell what a step took that carried `n_prompt` prompt tokens and `n_generating` generating rows."""
        if step_ms <= 0:
            return
        if n_prompt <= 0:
            if n_generating > 0:
                self._decode_ms = self._blend(self._decode_ms, step_ms)
            return
        per_token_ms = step_ms / n_prompt
        if n_generating == 0:
            if n_prompt >= min(16, self._n_ubatch):  # the fixed cost of a tiny batch says nothing about speed
                self._alone_ms = self._blend(self._alone_ms, per_token_ms)
            return
        if self._decode_ms is not None and step_ms > self._decode_ms:
            self._added_ms = self._blend(self._added_ms, (step_ms - self._decode_ms) / n_prompt)
        # A short rest of a prompt beside many generating rows would look very slow; it may only count as such
        # when it filled a fair part of what it was allowed.
        if n_prompt * 2 >= self.prompt_cap(n_generating) or per_token_ms < (self._mixed_ms or float("inf")):
            self._mixed_ms = self._blend(self._mixed_ms, per_token_ms)

    def _tokens_within(self, budget_ms: float, per_token_ms: float) -> int:
        if per_token_ms * self._n_batch <= budget_ms:  # nothing, where a clock is too coarse for the step
            return self._n_batch
        return int(budget_ms / per_token_ms)

    def _blend(self, old: float | None, new: float) -> float:
        return new if old is None else old + self._WEIGHT * (new - old)
