"""A slot: a place for one running job, and the sequence of the cache that it works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.cache import CachedSequence
from server.engine.messages import SlotState, SlotView
from server.engine.run import Run


@dataclass(frozen=True, slots=True)
class Following:
    """The run waits until `leader`, which reads the same prompt in another slot, has read `n_shared` tokens."""

    leader: Run
    n_shared: int


@dataclass(slots=True)
class Slot:
    """`sequence` belongs to the run while there is one, but for a run that still waits for another to read. After it,
    it is the one that the last run has left, which may serve another slot any time or be gone."""

    id: int
    n_ctx: int
    sequence: CachedSequence | None = None
    state: SlotState = SlotState.IDLE
    run: Run | None = None
    following: Following | None = None
    last_used: int = 0  # step number
    left: list[int] = field(default_factory=list)  # what the last run has left, wherever it is now

    @property
    def tokens(self) -> list[int]:
        """What the memory holds for the run; read only."""
        return self.sequence.tokens if self.sequence is not None else []

    @property
    def n_to_read(self) -> int:
        return len(self.run.tokens) - len(self.tokens) if self.run is not None else 0

    def release(self, step: int) -> None:
        """Let the run go. What becomes of its sequence is the caller's business."""
        self.run = None
        self.following = None
        self.state = SlotState.IDLE
        self.last_used = step

    def view(self) -> SlotView:
        run = self.run
        if run is None:
            left = self.sequence is not None and not self.sequence.live
            return SlotView(self.id, self.state, self.n_ctx, n_kept=len(self.tokens) if left else 0)
        held = 0 if self.state is SlotState.WAITING else len(self.tokens)
        return SlotView(
            self.id,
            self.state,
            self.n_ctx,
            job_id=run.job.id,
            n_prompt=run.n_prompt,
            n_processed=min(held, run.n_prompt),
            n_cached=run.n_cached,
            n_decoded=run.n_generated,
            n_kept=held,
        )
