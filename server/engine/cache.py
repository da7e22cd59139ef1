"""The cache as one resource: every sequence that holds cells, running or finished, and the states in host memory and
on disk.

A job asks for a sequence that holds as much of its prompt as can be had (`open`); a finished job leaves its sequence
behind (`retain`) until cells or sequence ids run short. What loses its cells goes to host memory while the budget
allows and comes back when that is quicker than reading the prompt again. Disk is behind host memory: what goes to the
one is written to the other, and what comes from disk comes by way of host memory (`disk_tier.py`, `recall.py`).

Cells are shared where the cache is unified and its states can be cut: a prefix costs nothing to have twice. Otherwise
(separate streams, recurrent states, sliding windows) a sequence is taken over, copied or restored as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.engine.backend import Backend, State
from server.engine.cells import CellLedger
from server.engine.disk_tier import DiskTier
from server.engine.host_tier import Entry, HostTier, Part
from server.engine.prefix import PrefixTree

# A tail this short is given up with its sequence rather than kept apart from it.
SHORT_TAIL = 64
# States of fewer tokens are not worth an entry.
MIN_SAVED = 32
# Copying a stream moves all its bytes: worth it for at least this part of its tokens, except for choices of one prompt.
MIN_STREAM_SHARE = 1 / 16
# Finished sequences may keep this part of the cells from running ones on a GPU, where attention skips them quickly; on
# a CPU every cell is walked by every token.
IDLE_SHARE_GPU = 0.25
IDLE_CELLS_CPU = 0  # every token walks over them
# How many holders of a prefix are tried before giving up on it.
_MAX_TRIES = 8


@dataclass(slots=True, eq=False)
class CachedSequence:
    """`tokens` are exactly what the memory holds for sequence `id`. `live`: a job uses it."""

    id: int
    tokens: list[int] = field(default_factory=list)
    live: bool = True
    last_used: int = 0
    n_offered: int = 0  # so many tokens of it were offered to disk

    @property
    def is_gone(self) -> bool:
        return self.id < 0


@dataclass(frozen=True, slots=True)
class Opened:
    """`sequence.tokens` are the first tokens of the job; `n_host` of them came from host memory, `n_disk` from disk."""

    sequence: CachedSequence
    n_host: int = 0
    n_disk: int = 0
    uncuttable: bool = False  # more of the prompt was there, in a state that could not be cut


@dataclass(slots=True)
class CacheCounts:
    """Monotone."""

    evicted: int = 0
    mismatches: int = 0
    saved: int = 0
    refused: int = 0


class Cache:
    """Owns the backend's memory. `prefill_tokens_per_s` tells the measured speed of reading prompts; 0: not known yet.
    `clock` returns seconds, monotone."""

    def __init__(
        self,
        backend: Backend,
        host: HostTier,
        prefill_tokens_per_s: Callable[[], float],
        clock: Callable[[], float],
        disk: DiskTier | None = None,
    ) -> None:
        facts = backend.facts
        self._backend = backend
        self.host = host
        self.disk = disk
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._now = clock
        self._can_cut = facts.can_cut
        self._unified = facts.kv_unified
        self._shares_cells = facts.shares_cells
        self._n_ctx = facts.n_ctx
        self._n_ctx_seq = facts.n_ctx_seq
        self._free = list(range(max(facts.n_sequences, facts.n_slots)))[::-1]
        self._sequences: dict[int, CachedSequence] = {}
        self._tree = PrefixTree()
        self._cells = CellLedger()
        self._uses = 0
        self._restore_bytes_per_s = 0.0
        self._n_from_disk = 0  # tokens, of those restored
        self.counts = CacheCounts()

    # ── what a job does ──────────────────────────────────────────────────────────────────────────────────────────────

    def reach(self, tokens: Sequence[int]) -> int:
        """Upper bound of how many of the tokens `open` can give at once: those in cells and those in host memory."""
        held = self.held(tokens)
        if self._shares_cells:
            return self.host.covered(tokens, held)
        return max(held, self.host.covered(tokens, 0))

    def held(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are in cells."""
        self._note_growth()
        match = self._tree.match(tokens)
        return match.n_tokens if match is not None else 0

    def holder(self, tokens: Sequence[int]) -> tuple[CachedSequence, int] | None:
        """A finished sequence that holds the longest prefix, and its length."""
        self._note_growth()
        for n_tokens, holders in reversed(self._tree.matches(tokens)):
            for holder in holders:
                if not self._sequences[holder].live:
                    return self._sequences[holder], n_tokens
        return None

    def open(self, tokens: list[int], *, reuse: bool, sibling: CachedSequence | None = None) -> Opened:
        """A sequence for a job, with as many of its tokens as can be had; the last is always left to be decoded for its
        logits. `sibling` is the running sequence of another choice of the same prompt."""
        prompt = tokens[:-1]
        if not reuse or not prompt:
            return Opened(self._new_sequence())
        sequence, tried = self._from_cells(prompt, sibling)
        held = len(sequence.tokens) if sequence is not None else 0
        n_host = self._n_from_disk = 0
        if self.host.limit_bytes:
            if self._shares_cells:
                sequence = sequence or self._new_sequence()
                n_host = self._append_from_host(sequence, prompt)
            else:
                part = self._whole_part(prompt, held)
                if part is not None:
                    if sequence is not None:
                        self.retain(sequence)
                    sequence = self._new_sequence()
                    n_host = part.end if self._restore(sequence, part) else 0
        sequence = sequence or self._new_sequence()
        if self.disk is not None:
            self.disk.note_use(prompt)
        n_disk = self._n_from_disk
        return Opened(sequence, n_host - n_disk, n_disk, uncuttable=not self._can_cut and tried > len(sequence.tokens))

    def append(self, sequence: CachedSequence, tokens: list[int]) -> None:
        """They were decoded."""
        sequence.tokens += tokens
        self._cells.add(sequence.id, len(tokens))

    def retain(self, sequence: CachedSequence) -> None:
        """Its job has ended; what it holds may serve others."""
        self._uses += 1
        sequence.last_used = self._uses
        sequence.live = False
        if not sequence.tokens:
            self._let_go(sequence)

    def discard(self, sequence: CachedSequence) -> None:
        """Drop it; nothing of it is to be trusted or needed."""
        if not sequence.is_gone:
            self._let_go(sequence)

    def swap_out(self, sequence: CachedSequence) -> Entry | None:
        """Give up the cells of a running job that comes back. Its state in host memory is kept for it while it is
        `pinned`, at the longest until it is back; None: there is none, the job will read its tokens again."""
        entry = self._save(sequence, pinned=True)
        self._let_go(sequence)
        return entry

    def save(self, sequence: CachedSequence) -> None:
        """Keep a copy of the state in host memory, if it is worth it."""
        self._save(sequence)

    def save_next(self) -> bool:
        """For disk: keep a copy of what the finished sequence used last holds. False: all have been offered."""
        unsaved = self._unsaved()
        if unsaved:
            self._offer(max(unsaved, key=lambda s: s.last_used))
        return bool(unsaved)

    @property
    def has_unsaved(self) -> bool:
        return self.disk is not None and bool(self._unsaved())

    def save_all(self, deadline: float) -> None:
        """For a restart: to disk with all that finished sequences hold, and then with the rest of host memory, the last
        used first, until `deadline` by the clock."""
        if self.disk is None:
            return
        for sequence in sorted(self._unsaved(), key=lambda s: -s.last_used):
            if self._now() >= deadline:
                return
            self._offer(sequence)
            self.disk.flush(deadline, most=1)
        self.disk.flush(deadline)

    def _unsaved(self) -> list[CachedSequence]:
        return [s for s in self._sequences.values() if not s.live and s.n_offered != len(s.tokens)]

    def _offer(self, sequence: CachedSequence) -> None:
        sequence.n_offered = len(sequence.tokens)
        self._save(sequence, alone=True)

    def finished(self, tokens: list[int]) -> CachedSequence:
        """A finished sequence that holds just these tokens, or the first of them that can be had."""
        if self._shares_cells:
            self._note_growth()
            n_tokens, holders = next(reversed(self._tree.matches(tokens)), (0, []))
            holder = next((s for s in map(self._sequences.__getitem__, holders) if n_tokens == len(tokens)), None)
            if holder is not None and len(holder.tokens) > n_tokens and self._has_other_place(holder):
                sequence = self._copy(holder, n_tokens)  # it goes on with more, and is to keep that
                if sequence is not None:
                    self.retain(sequence)
                    return sequence
        sequence = self.open([*tokens, tokens[-1]], reuse=True).sequence
        self.retain(sequence)
        return sequence

    def state_of(self, sequence: CachedSequence) -> State | None:
        """All that it holds, however much that is. None: llama.cpp gave nothing."""
        return self._backend.save(sequence.id, 0, sys.maxsize) if self._is_true(sequence) else None

    def adopt(self, tokens: list[int], state: State) -> CachedSequence | None:
        """A finished sequence that holds these tokens. None: there is no room, or llama.cpp did not take the state."""
        if not self._free and not self._retained():
            return None
        sequence = self._new_sequence()
        if not (self._has_cells(len(tokens)) and self._put(sequence, tokens, state, 0, len(tokens))):
            self._let_go(sequence)
            return None
        self.retain(sequence)
        return sequence

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def drop_one(self) -> bool:
        """Free the cells of the least recently used finished sequence. False: there is none."""
        retained = self._retained()
        if not retained:
            return False
        freeing = [s for s in retained if self._cells.n_unique(s.id)] or retained
        self._drop(min(freeing, key=lambda s: s.last_used))
        return True

    def trim(self, n_cells: int) -> None:
        """For one step beside running jobs: drop a finished sequence when such ones hold more than `n_cells`."""
        if self.n_retained and self.n_retained_cells() > n_cells:
            self.drop_one()

    def sequences(self) -> list[CachedSequence]:
        return list(self._sequences.values())

    @property
    def n_used(self) -> int:
        return self._cells.n_used

    def n_live_cells(self) -> int:
        return self._cells.n_union(s.id for s in self._sequences.values() if s.live)

    def n_retained_cells(self) -> int:
        return self._cells.n_used - self.n_live_cells()

    def n_shared_cells(self) -> int:
        return self._cells.n_shared()

    @property
    def n_retained(self) -> int:
        return len(self._retained())

    # ── from cells ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _from_cells(self, prompt: list[int], sibling: CachedSequence | None) -> tuple[CachedSequence | None, int]:
        """The sequence with the most of the prompt, and the length of the longest match there was."""
        self._note_growth()
        places = self._tree.matches(prompt)
        longest = places[-1][0] if places else 0
        n_tries = 0
        for n_tokens, holders in reversed(places):
            for holder in self._in_order(holders, n_tokens):
                if n_tries == _MAX_TRIES:
                    return None, longest
                n_tries += 1
                sequence = self._derive(holder, n_tokens, sibling)
                if sequence is not None:
                    return sequence, longest
        return None, longest

    def _in_order(self, holders: list[int], n_tokens: int) -> list[CachedSequence]:
        """Finished ones with the shortest tail first: they can be taken over."""
        sequences = [self._sequences[holder] for holder in holders if holder in self._sequences]
        return sorted(sequences, key=lambda s: (s.live, len(s.tokens) - n_tokens))

    def _derive(self, holder: CachedSequence, n_tokens: int, sibling: CachedSequence | None) -> CachedSequence | None:
        if holder.is_gone or not self._is_true(holder):  # gone: dropped to make room for an earlier try
            return None
        n_tail = len(holder.tokens) - n_tokens
        may_copy = self._may_copy(holder, n_tokens, sibling) and self._has_other_place(holder)
        if holder.live or (may_copy and n_tail > SHORT_TAIL):
            return self._copy(holder, n_tokens) if may_copy else None
        if n_tail > SHORT_TAIL:
            if n_tokens < n_tail and self._has_other_place(holder):
                return None  # a chat is not given up for a few tokens in common
            if self._can_cut:
                self._save(holder)
        return self._take_over(holder, n_tokens)

    def _has_other_place(self, holder: CachedSequence) -> bool:
        return bool(self._free) or any(s is not holder for s in self._retained())

    def _may_copy(self, holder: CachedSequence, n_tokens: int, sibling: CachedSequence | None) -> bool:
        if not self._can_cut and n_tokens < len(holder.tokens):
            return False
        if self._unified:
            return True
        return holder is sibling or n_tokens >= MIN_STREAM_SHARE * self._n_ctx_seq

    def _take_over(self, holder: CachedSequence, n_tokens: int) -> CachedSequence | None:
        if not self._backend.keep(holder.id, n_tokens):
            return None
        if n_tokens < len(holder.tokens):
            del holder.tokens[n_tokens:]
            self._tree.cut(holder.id, n_tokens)
            self._cells.cut(holder.id, n_tokens)
        holder.live = True
        return holder

    def _copy(self, source: CachedSequence, n_tokens: int) -> CachedSequence | None:
        was_live, source.live = source.live, True  # not to be dropped for its own copy
        try:
            target = self._new_sequence()
        finally:
            source.live = was_live
        if not self._backend.copy(source.id, target.id, n_tokens):
            self._let_go(target)
            return None
        target.tokens = source.tokens[:n_tokens]
        if self._unified:
            self._cells.share(source.id, target.id, n_tokens)
        else:
            self._cells.add(target.id, n_tokens)
        return target

    # ── from host memory ─────────────────────────────────────────────────────────────────────────────────────────────

    def _append_from_host(self, sequence: CachedSequence, prompt: list[int]) -> int:
        parts = self.host.way(prompt, len(sequence.tokens))
        n_before = len(sequence.tokens)
        if not parts or not self._pays(parts, parts[-1].end - n_before):
            return 0
        for part in parts:
            if not self._restore(sequence, part):
                break
        self.host.touch([part for part in parts if part.end <= len(sequence.tokens)])
        return len(sequence.tokens) - n_before

    def _whole_part(self, prompt: list[int], n_held: int) -> Part | None:
        """A state from position 0 on that reaches further than `n_held`, far enough to pay."""
        part = self.host.at_once(prompt, can_cut=self._can_cut)
        if part is None or part.end <= n_held or not self._pays([part], part.end - n_held):
            return None
        self.host.touch([part])
        return part

    def _restore(self, sequence: CachedSequence, part: Part) -> bool:
        entry = part.entry
        if not self._has_cells(entry.end - entry.start) or not self._backend.is_settled(sequence.id):
            return False
        if not entry.intact() or not self._put(sequence, entry.tokens, entry.data, part.start, part.end):
            self.counts.refused += 1
            self.host.drop(entry)
            return False
        entry.pinned = False  # the job that left it is back, or another made use of it
        if entry.from_disk:
            entry.from_disk = False
            self._n_from_disk += part.end - part.start
        return True

    def _has_cells(self, n_cells: int) -> bool:
        """Make room for so many, if need be."""
        if self._unified:
            while self._cells.n_used + n_cells > self._n_ctx:
                if not self.drop_one():
                    return False
        return True

    def _put(self, sequence: CachedSequence, tokens: list[int], state: State, start: int, end: int) -> bool:
        """Give the sequence, which holds `start` tokens, those up to `end`."""
        began = self._now()
        if not self._backend.restore(sequence.id, state, start, end):
            return False
        self._measure(state.nbytes, self._now() - began)
        self._cells.add(sequence.id, end - start)
        sequence.tokens += tokens[start:end]
        return True

    def _pays(self, parts: list[Part], n_tokens: int) -> bool:
        return self.pays(sum(part.entry.data.nbytes for part in parts), n_tokens)

    def pays(self, n_bytes: int, n_tokens: int, more_s: float = 0.0) -> bool:
        """Is bringing back a state quicker than reading its tokens, where it takes `more_s` beside the restoring? Yes,
        as long as either speed is unknown."""
        speed = self._prefill_tokens_per_s()
        if not speed or not self._restore_bytes_per_s:
            return True
        return n_bytes / self._restore_bytes_per_s + more_s <= n_tokens / speed

    def _measure(self, n_bytes: int, seconds: float) -> None:
        if seconds > 0:
            rate = n_bytes / seconds
            old = self._restore_bytes_per_s
            self._restore_bytes_per_s = rate if not old else (old + rate) / 2

    # ── to host memory ───────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, sequence: CachedSequence, *, pinned: bool = False, alone: bool = False) -> Entry | None:
        """The new entry, if one was needed and there was room. `alone`: whatever other sequences hold as well, which
        may not be there when it is needed."""
        tokens, host = sequence.tokens, self.host
        if not host.limit_bytes or not tokens or not self._is_true(sequence):
            return None
        if self._shares_cells:
            start = held = host.covered(tokens, 0 if alone else self._held_by_others(sequence))
        else:
            start = 0
            part = host.at_once(tokens, can_cut=self._can_cut)
            held = part.end if part is not None else 0
        if len(tokens) - held < (1 if pinned else MIN_SAVED):
            host.touch(host.way(tokens, 0))
            return None
        if not host.has_room(0, len(tokens)):
            return None
        state = self._backend.save(sequence.id, start, host.limit_bytes)
        if state is None:
            return None
        entry = host.keep(list(tokens), start, state, pinned=pinned)
        self.counts.saved += entry is not None
        if entry is not None and not pinned and self.disk is not None:
            self.disk.keep(entry)
        return entry

    def _held_by_others(self, sequence: CachedSequence) -> int:
        self._note_growth()
        longest = 0
        for n_tokens, holders in self._tree.matches(sequence.tokens):
            if holders == [sequence.id]:
                break
            longest = n_tokens
        return longest

    # ── sequences ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_sequence(self) -> CachedSequence:
        """An empty one; the least recently used finished one is dropped where no id is free."""
        if not self._free:
            retained = self._retained()
            assert retained, "more jobs than sequences"
            self._drop(min(retained, key=lambda s: s.last_used))
        free = next((i for i in reversed(self._free) if self._backend.is_settled(i)), self._free[-1])
        self._free.remove(free)
        sequence = CachedSequence(free)
        self._sequences[sequence.id] = sequence
        return sequence

    def _retained(self) -> list[CachedSequence]:
        return [s for s in self._sequences.values() if not s.live]

    def _drop(self, sequence: CachedSequence) -> None:
        self._save(sequence)
        self.discard(sequence)  # unless saving has found it untrue, and let it go
        self.counts.evicted += 1

    def _let_go(self, sequence: CachedSequence) -> None:
        self._backend.keep(sequence.id, 0)
        self._cells.cut(sequence.id, 0)
        self._tree.remove(sequence.id)
        del self._sequences[sequence.id]
        self._free.append(sequence.id)
        sequence.id = -1
        sequence.tokens = []

    def _is_true(self, sequence: CachedSequence) -> bool:
        """Trust nothing: what the memory says it holds must agree with what the tokens say."""
        if self._backend.length(sequence.id) == len(sequence.tokens):
            return True
        self.counts.mismatches += 1
        if not sequence.live:
            self._let_go(sequence)
        return False

    def _note_growth(self) -> None:
        """Bring the tree up to date: it is asked seldom, and sequences grow with every step."""
        for sequence in self._sequences.values():
            if len(sequence.tokens) > self._tree.length(sequence.id):
                self._tree.put(sequence.id, sequence.tokens)
