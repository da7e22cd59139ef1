"""From the queue into slots: which waiting run goes where, and whom it waits for to read what both need."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.backend import Backend
from server.engine.cache import Cache, Opened
from server.engine.messages import SlotState
from server.engine.prefix import common_length
from server.engine.run import Run
from server.engine.slots import Following, Slot

# Waiting for another slot to read a shared prefix must save at least this many tokens.
MIN_SHARED = 32
# The template's beginning of an answer has at most so many tokens.
_ANSWER_BEGINS_WITHIN = 16


class Admission:
    """Places runs. Keeps nothing of its own but counts: slots and cache are the state."""

    def __init__(self, slots: Sequence[Slot], cache: Cache, backend: Backend, min_similarity: float) -> None:
        self._slots = slots
        self._cache = cache
        self._can_cut = backend.facts.can_cut
        self._shares_cells = backend.facts.shares_cells
        self._is_control = backend.is_control
        self._min_similarity = min_similarity
        self.n_follower_waits = 0
        self.n_uncuttable = 0
        self.n_tokens_host = 0
        self.n_tokens_disk = 0

    def choose(self, run: Run) -> Slot | None:
        """An idle slot for the run: the one it names, else the one that left most of its prompt behind, else the one
        unused for longest. None: it has to wait."""
        if run.job.slot is not None:
            named = self._slots[run.job.slot % len(self._slots)]
            return named if named.state is SlotState.IDLE else None
        idle = [slot for slot in self._slots if slot.state is SlotState.IDLE]
        if not idle:
            return None
        if run.job.cache_prompt:
            held = self._cache.holder(run.tokens)
            if held is not None and held[1] > self._min_similarity * len(run.tokens):
                slot = next((slot for slot in idle if slot.sequence is held[0]), None)
                if slot is not None:
                    return slot
        return min(idle, key=lambda slot: (bool(slot.tokens), slot.last_used, slot.id))

    def nearest(self, run: Run) -> Sequence[int]:
        """The tokens, held in cells or host memory or being read, that have most in common with the run's; empty: none
        have anything."""
        held: list[Sequence[int]] = [slot.run.tokens for slot in self._slots if slot.run is not None]
        held += [sequence.tokens for sequence in self._cache.sequences()]
        held += [entry.tokens for entry in self._cache.host.entries()]
        return max(held, key=lambda tokens: common_length(run.tokens, tokens), default=())

    def place(self, run: Run, slot: Slot) -> None:
        """Give the slot to the run. It reads at once, or waits for a slot that is reading the same tokens."""
        slot.run = run
        slot.sequence = None
        slot.left = []
        following = self._leader_of(run)
        if following is None:
            self.begin_reading(slot)
        else:
            self.n_follower_waits += 1
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
        """Give the slot a sequence with the longest prefix of the run that can be had, and start the prefill."""
        run = slot.run
        assert run is not None
        siblings = (other.sequence for other in self._slots if other is not slot and _is_sibling(run, other))
        opened = self._cache.open(run.tokens, reuse=run.job.cache_prompt, sibling=next(siblings, None))
        slot.sequence = opened.sequence
        if run.prompt_done_at is None:
            run.n_cached = len(slot.tokens)
            run.n_prompt_decoded = 0
            self._count(opened)
        run.checkpoint = self._checkpoint(run) if len(slot.tokens) < len(run.tokens) - 1 else 0
        slot.state = SlotState.PREFILL

    def _checkpoint(self, run: Run) -> int:
        """Where the next turn of the chat will part from this prompt: at the last control token, which begins the
        answer. Only for states that cannot be cut there later."""
        if self._can_cut or not run.job.cache_prompt or run.prompt_done_at is not None:
            return 0
        tokens = run.job.tokens
        last = range(len(tokens) - 1, max(len(tokens) - _ANSWER_BEGINS_WITHIN, 0), -1)
        return next((i for i in last if self._is_control(tokens[i])), len(tokens) - 1)

    def _count(self, opened: Opened) -> None:
        self.n_tokens_host += opened.n_host
        self.n_tokens_disk += opened.n_disk
        self.n_uncuttable += opened.uncuttable

    def _leader_of(self, run: Run) -> Following | None:
        """A slot that is reading tokens which this run needs too and that are nowhere to be had yet."""
        if not run.job.cache_prompt:
            return None
        reading = [s for s in self._slots if s.run is not None and s.run is not run and s.state is SlotState.PREFILL]
        if not reading:
            return None
        limit = len(run.tokens) - 1
        n_have = min(self._cache.reach(run.tokens), limit)
        best: Following | None = None
        for other in reading:
            assert other.run is not None
            sibling = _is_sibling(run, other)
            if not (self._shares_cells or sibling):
                continue
            n_shared = min(common_length(run.tokens, other.run.tokens), limit)
            if n_shared - n_have < (1 if sibling else MIN_SHARED):
                continue
            if best is None or n_shared > best.n_shared:
                best = Following(other.run, n_shared)
        return best


def _is_sibling(run: Run, other: Slot) -> bool:
    wanted = run.job.same_prompt_as
    return wanted is not None and other.run is not None and wanted in (other.run.job.id, other.run.job.same_prompt_as)
