"""From the queue into slots: which waiting run goes where, and with how much of its prompt already read."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.backend import Backend
from server.engine.messages import SlotState
from server.engine.prefix import common_length, longest_match
from server.engine.run import Run
from server.engine.slots import Following, Slot

# Waiting for another slot to read a shared prefix must save at least this many tokens.
MIN_SHARED = 32
# A slot is taken over for its prefix only where at least this part of what it holds is that prefix.
KEEP_SHARE = 0.5


class Admission:
    """Places runs. Keeps nothing of its own: slots and backend are the state."""

    def __init__(self, slots: Sequence[Slot], backend: Backend, *, unified: bool, min_similarity: float) -> None:
        self._slots = slots
        self._backend = backend
        self._unified = unified
        self._min_similarity = min_similarity

    def choose(self, run: Run) -> Slot | None:
        """An idle slot for the run: the one it names, else the one that holds most of its prompt, else an empty one,
        else the one unused for longest. None: it has to wait."""
        if run.job.slot is not None:
            named = self._slots[run.job.slot % len(self._slots)]
            return named if named.state is SlotState.IDLE else None
        idle = [slot for slot in self._slots if slot.state is SlotState.IDLE]
        if not idle:
            return None
        if run.job.cache_prompt:
            match = longest_match(run.tokens, ((slot.id, slot.tokens) for slot in idle))
            if match is not None and match.n_tokens > self._min_similarity * len(run.tokens):
                holder = self._slots[match.sequence]
                # With shared cells the prefix can be had without taking the slot from the chat that it belongs to.
                if not self._unified or match.n_tokens >= KEEP_SHARE * len(holder.tokens):
                    return holder
        return min(idle, key=lambda slot: (bool(slot.tokens), slot.last_used, slot.id))

    def place(self, run: Run, slot: Slot) -> None:
        """Give the slot to the run. It reads at once, or waits for a slot that is reading the same tokens."""
        slot.run = run
        following = self._leader_of(run, slot)
        if following is None:
            self.begin_reading(slot)
        else:
            slot.following = following
            slot.state = SlotState.WAITING

    def resume(self, slot: Slot) -> None:
        """For a WAITING slot: start reading when the leader has read what is shared. When the leader is gone before,
        look again: the first follower to come by starts reading, and the others follow that one."""
        following, run = slot.following, slot.run
        if following is None or run is None:
            return
        leader = next((s for s in self._slots if s.run is following.leader), None)
        if leader is not None and len(leader.tokens) >= following.n_shared:
            slot.following = None
            self.begin_reading(slot)
        elif leader is None or leader.state is not SlotState.PREFILL:
            slot.following = None
            self.place(run, slot)

    def begin_reading(self, slot: Slot) -> None:
        """Bring the slot's sequence to the longest prefix of the run that the cache can give, and start the prefill."""
        run = slot.run
        assert run is not None
        n_reused = self._reuse(run, slot) if run.job.cache_prompt else 0
        # Trust nothing: what the memory says it holds must agree with what the tokens say.
        if n_reused == 0 or self._backend.length(slot.id) != n_reused:
            self.clear(slot)
        if run.prompt_done_at is None:
            run.n_cached = len(slot.tokens)
            run.n_prompt_decoded = 0
        slot.state = SlotState.PREFILL

    def clear(self, slot: Slot) -> None:
        self._backend.keep(slot.id, 0)
        slot.tokens = []

    def _reuse(self, run: Run, slot: Slot) -> int:
        """Tokens of the run the slot's sequence holds afterwards; at least one is left to be decoded for its logits."""
        limit = len(run.tokens) - 1
        own = min(common_length(run.tokens, slot.tokens), limit)
        others = (
            (other.id, other.tokens)
            for other in self._slots
            if other is not slot and (self._unified or self._is_sibling(run, other))
        )
        match = longest_match(run.tokens, others)
        if match is not None and min(match.n_tokens, limit) > own:
            n = min(match.n_tokens, limit)
            source = self._slots[match.sequence]
            if self._backend.length(source.id) == len(source.tokens) and self._backend.copy(source.id, slot.id, n):
                slot.tokens = run.tokens[:n]
                return n
        if own and self._backend.length(slot.id) == len(slot.tokens) and self._backend.keep(slot.id, own):
            slot.tokens = run.tokens[:own]
            return own
        return 0

    def _leader_of(self, run: Run, slot: Slot) -> Following | None:
        """A slot that is reading tokens which this run needs too and no slot holds yet."""
        if not run.job.cache_prompt:
            return None
        limit = len(run.tokens) - 1
        have = longest_match(run.tokens, ((s.id, s.tokens) for s in self._slots if self._unified or s is slot))
        n_have = min(have.n_tokens, limit) if have else 0
        best: Following | None = None
        for other in self._slots:
            if other.run is None or other.state is not SlotState.PREFILL:
                continue
            sibling = self._is_sibling(run, other)
            if not (self._unified or sibling):
                continue
            n_shared = min(common_length(run.tokens, other.run.tokens), limit)
            if n_shared - n_have < (1 if sibling else MIN_SHARED):
                continue
            if best is None or n_shared > best.n_shared:
                best = Following(other.run, n_shared)
        return best

    @staticmethod
    def _is_sibling(run: Run, other: Slot) -> bool:
        wanted = run.job.same_prompt_as
        return (
            wanted is not None and other.run is not None and wanted in (other.run.job.id, other.run.job.same_prompt_as)
        )
