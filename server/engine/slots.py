"""A slot: one sequence of the cache, the tokens it holds, and the run that uses it, if any."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.messages import SlotState, SlotView
from server.engine.run import Run


@dataclass(frozen=True, slots=True)
class Following:
    """The run waits until `leader`, which reads the same prompt in another slot, has read `n_shared` tokens."""

    leader: Run
    n_shared: int


@dataclass(slots=True)
class Slot:
    """`tokens` are exactly what the memory holds for sequence `id`; a finished run leaves them for the next one."""

    id: int
    n_ctx: int
    tokens: list[int] = field(default_factory=list)
    state: SlotState = SlotState.IDLE
    run: Run | None = None
    following: Following | None = None
    last_used: int = 0  # step number

    @property
    def n_to_read(self) -> int:
        return len(self.run.tokens) - len(self.tokens) if self.run is not None else 0

    def release(self, step: int) -> None:
        """Let the run go and keep its tokens."""
        self.run = None
        self.following = None
        self.state = SlotState.IDLE
        self.last_used = step

    def view(self) -> SlotView:
        run = self.run
        if run is None:
            return SlotView(self.id, self.state, self.n_ctx, n_kept=len(self.tokens))
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
