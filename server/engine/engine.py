"""The engine: jobs in, events out, one batch a step. Synchronous; the process around it only moves messages.

step:  resume followers → admit → plan rows → decode → sample → events
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from server.engine.admission import Admission
from server.engine.backend import Backend, DecodeStatus, Logits, Piece
from server.engine.cache import IDLE_CELLS_CPU, IDLE_SHARE_GPU, Cache, CachedSequence
from server.engine.disk_tier import DiskStore, DiskTier
from server.engine.divergence import find_divergence
from server.engine.host_tier import HostTier
from server.engine.messages import (
    Counters,
    FailureKind,
    Finished,
    FinishReason,
    Job,
    JobEvent,
    Progress,
    SlotState,
    Snapshot,
    Started,
)
from server.engine.options import SchedulerOptions
from server.engine.queue import Answer, WaitingQueue
from server.engine.recall import Recall
from server.engine.resting import RestingSlots
from server.engine.run import Run
from server.engine.scheduler import Reader, StepClock, plan_step
from server.engine.slots import Slot
from server.errors import EngineFailure, RequestError

# So many decode failures in a row mean that the context is beyond help: the process is to be started anew.
MAX_FAILED_STEPS = 3


class Engine:
    """Owns the slots and the queue. `backend` must be used by nobody else. Every submitted job ends in exactly one
    Finished or Failed event. `clock` returns seconds, monotone. `disk`: where states outlive the process."""

    def __init__(
        self,
        backend: Backend,
        options: SchedulerOptions,
        clock: Callable[[], float] = time.perf_counter,
        disk: DiskStore | None = None,
    ) -> None:
        facts = backend.facts
        self._backend = backend
        self._options = options
        self._now = clock
        self._slots = [Slot(i, facts.n_ctx_seq) for i in range(facts.n_slots)]
        self._clock = StepClock(options.max_stall_ms, facts.n_batch, facts.n_ubatch)
        host = HostTier(options.cache_ram_bytes, can_cut=facts.can_cut)
        self._disk = DiskTier(disk, host, can_cut=facts.can_cut, clock=clock) if disk is not None else None
        self.cache = Cache(backend, host, lambda: self._clock.prefill_tokens_per_s, clock, self._disk)
        self._recall = Recall(self.cache, self._disk, facts) if self._disk is not None else None
        self.resting = RestingSlots(self._slots, self.cache)
        self._admission = Admission(self._slots, self.cache, backend, options.slot_prompt_similarity)
        self._idle_cells = self._cells_for_idle(options)
        self._waiting = WaitingQueue()
        self._outbox: list[JobEvent] = []
        self._counts = {field: 0.0 if "_ms" in field else 0 for field in Counters.__struct_fields__}
        self._step = 0
        self._step_ms = 0.0
        self._failed_steps = 0
        self._announced = False

    # ── the four verbs ───────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, job: Job, arrived_at: float | None = None) -> None:
        """Queue a job. Whatever is wrong with it is told by a Failed event of the next step. `arrived_at`, by the
        engine's clock, is when its wait began, if that was not just now."""
        self._counts["jobs_submitted"] += 1
        run = Run.of(job, self._now() if arrived_at is None else arrived_at)
        n_ctx = self._backend.facts.n_ctx_seq
        if not 0 < len(job.tokens) < n_ctx:
            message = f"the prompt has {len(job.tokens)} tokens; it must have at least 1 and fewer than {n_ctx}"
            self._fail(run, FailureKind.INVALID, message)
            return
        # A wrong grammar is told at once; other samplers are made when their job gets a slot.
        if job.sampling.grammar is None or self._has_sampler(run):
            self._waiting.add(run)

    def cancel(self, job_id: int) -> None:
        """End a job, queued or running. Its slot is free at once and keeps what was read. Unknown ids are ignored:
        the job may just have ended."""
        waiting = self._waiting.remove(job_id)
        if waiting is not None:
            self._cancelled(waiting)
            return
        for slot in self._slots:
            if slot.run is not None and slot.run.job.id == job_id:
                run = slot.run
                self._leave(slot)
                self._cancelled(run)
                return

    @property
    def has_work(self) -> bool:
        """A step would do something. Not while all there is waits for the disk: its threads wake the process up."""
        if self._outbox or any(slot.run is not None for slot in self._slots):
            return True
        return any(not run.waits_for_disk for run in self._waiting) or self.cache.has_unsaved

    def step(self) -> list[JobEvent]:
        """Run one batch, if there is anything to run, and return what happened since the last step. A step in which
        a job starts tells that first and leaves the batch to the next step.

        Raises EngineFailure when llama.cpp fails again and again; the process should then end.
        """
        self._step += 1
        if self._disk is not None:
            self._disk.tend()
        for slot in self._slots:
            if slot.state is SlotState.WAITING:
                self._admission.resume(slot)
        self._admit()
        if self._idle_cells is not None and any(slot.run is not None for slot in self._slots):
            self.cache.trim(self._idle_cells)
        self._announced = False
        pieces = self._plan()
        # A prompt's first batch may take seconds: that the job has started is told before it.
        if pieces and not self._announced:
            self._run_batch(pieces)
        elif not pieces and self._disk is not None:
            self.cache.save_next()
            self._disk.tend()
        events, self._outbox = self._outbox, []
        return events

    def close(self, save_s: float = 0.0) -> None:
        """End all jobs; for up to `save_s` seconds save to disk what is only in memory."""
        deadline = self._now() + save_s
        running = [slot.run.job.id for slot in self._slots if slot.run is not None]
        for job_id in [*running, *(run.job.id for run in self._waiting)]:
            self.cancel(job_id)
        if self._disk is not None:
            self.cache.save_all(deadline)
            self._disk.close()

    def snapshot(self) -> Snapshot:
        facts, cache, admission, disk = self._backend.facts, self.cache, self._admission, self._disk
        self._counts |= {
            "evicted": cache.counts.evicted,
            "cache_mismatches": cache.counts.mismatches,
            "states_saved": cache.counts.saved,
            "states_refused": cache.counts.refused,
            "follower_waits": admission.n_follower_waits,
            "cached_tokens_host": admission.n_tokens_host,
            "cached_tokens_disk": admission.n_tokens_disk,
            "rereads_uncuttable": admission.n_uncuttable,
        }
        if disk is not None:
            self._counts |= {
                "disk_written": disk.counts.written,
                "disk_refused": disk.counts.refused,
                "disk_failed": disk.counts.failed,
            }
        return Snapshot(
            slots=[slot.view() for slot in self._slots],
            n_waiting=len(self._waiting),
            counters=Counters(**self._counts),  # type: ignore[arg-type]
            cells_total=facts.n_ctx,
            cells_used=cache.n_used,
            step_ms=self._step_ms,
            prefill_tokens_per_s=self._clock.prefill_tokens_per_s,
            cells_retained=cache.n_retained_cells(),
            cells_shared=cache.n_shared_cells(),
            n_retained=cache.n_retained,
            host_cache_bytes=cache.host.n_bytes,
            host_cache_limit_bytes=cache.host.limit_bytes,
            host_cache_entries=len(cache.host),
            disk_cache_bytes=disk.n_bytes if disk is not None else 0,
            disk_cache_limit_bytes=disk.limit_bytes if disk is not None else 0,
            disk_cache_entries=len(disk) if disk is not None else 0,
            disk_cache_pending=disk is not None and (cache.has_unsaved or not disk.has_caught_up),
        )

    def _cells_for_idle(self, options: SchedulerOptions) -> int | None:
        """How many cells finished sequences may keep beside running ones; None: as many as nobody else wants. Without
        host memory to go to they stay, and separate streams are in nobody's way."""
        facts = self._backend.facts
        if not (options.cache_idle_slots and options.cache_ram_bytes and facts.shares_cells):
            return None
        on_gpu = any(device.kind != "cpu" for device in facts.devices)
        return int(facts.n_ctx * IDLE_SHARE_GPU) if on_gpu else IDLE_CELLS_CPU

    # ── admit ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        if self._waiting and any(slot.run is None for slot in self._slots):
            n_running = Counter(slot.run.job.owner for slot in self._slots if slot.run is not None)
            self._waiting.offer(n_running, self._place)

    def _place(self, run: Run) -> Answer:
        """Give a waiting run a slot, if there is one for it."""
        if run.preempted and not self._has_room_again(run):
            return Answer.STOP
        if self._recall is not None and self._recall.awaits(run):
            return Answer.NEXT
        slot = self._admission.choose(run)
        if slot is None:
            # Where it waits for one slot, those behind it need not.
            return Answer.STOP if run.job.slot is None else Answer.NEXT
        if self._has_sampler(run):
            if run.job.explain_cache and not run.preempted:
                run.divergence = find_divergence(run.tokens, self._admission.nearest(run), self._text_of)
            self._admission.place(run, slot)
        return Answer.TAKEN

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._backend.detokenize(list(tokens), show_special=True)

    def _has_sampler(self, run: Run) -> bool:
        """Make the run's sampler unless it has one. False: its options are wrong, and the run has failed."""
        if run.sampler is None:
            try:
                run.sampler = self._backend.sampler(run.job)
            except RequestError as error:
                self._fail(run, FailureKind.INVALID, error.message)
                return False
        return True

    def _has_room_again(self, run: Run) -> bool:
        """A run that was swapped out comes back when it fits beside those that pushed it out."""
        n_running = sum(1 for slot in self._slots if slot.run is not None)
        facts = self._backend.facts
        needed = len(run.tokens) + facts.n_ubatch + n_running
        return not n_running or self.cache.n_live_cells() + needed <= facts.n_ctx

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _plan(self) -> list[Piece]:
        for slot in self._slots:
            if slot.state is SlotState.GENERATING and len(slot.tokens) >= slot.n_ctx:
                self._end(slot, FinishReason.LENGTH, truncated=True)
        generating = [slot for slot in self._slots if slot.state is SlotState.GENERATING]
        pieces = [Piece(_sequence(slot).id, len(slot.tokens), [_next_token(slot)], Logits.LAST) for slot in generating]
        if generating and not self._options.cont_batching:
            return pieces
        reading = sorted(
            (slot for slot in self._slots if slot.state is SlotState.PREFILL), key=lambda slot: _run(slot).submitted_at
        )
        shares = plan_step(
            len(generating),
            [Reader(slot.id, slot.n_to_read) for slot in reading],
            self._backend.facts.n_batch,
            self._clock.prompt_cap(len(generating)),
            turn=self._step,
        )
        for share in shares:
            slot = self._slots[share.slot]
            run, start = _run(slot), len(slot.tokens)
            end = start + share.n_tokens
            if start < run.checkpoint < end:
                end = run.checkpoint
            logits = Logits.LAST if end == len(run.tokens) else Logits.NONE
            pieces.append(Piece(_sequence(slot).id, start, run.tokens[start:end], logits))
            self._announce(slot)
        return pieces

    def _announce(self, slot: Slot) -> None:
        run = _run(slot)
        if run.started_at is not None:
            return
        self._announced = True
        run.started_at = self._now()
        queue_ms = (run.started_at - run.submitted_at) * 1e3
        self._counts["prompt_cached_tokens"] += run.n_cached
        self._outbox.append(Started(run.job.id, slot.id, run.n_prompt, run.n_cached, queue_ms, run.divergence))
        if run.job.report_progress:
            self._outbox.append(Progress(run.job.id, run.n_prompt, run.n_cached, run.n_cached, 0.0))

    # ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_batch(self, planned: list[Piece]) -> None:
        slots = {slot.sequence.id: slot for slot in self._slots if slot.run is not None and slot.sequence is not None}
        begun = self._now()
        pieces = self._decode(planned, slots)
        now = self._now()
        self._step_ms = (now - begun) * 1e3
        if not pieces:
            return
        n_generating = sum(1 for piece in pieces if slots[piece.sequence].state is SlotState.GENERATING)
        n_prompt = sum(len(p.tokens) for p in pieces if slots[p.sequence].state is not SlotState.GENERATING)
        self._clock.measured(n_generating, n_prompt, self._step_ms)
        self._counts["n_decode"] += 1
        self._counts["n_busy_slots"] += len(pieces)
        self._counts["prompt_tokens"] += n_prompt
        row = 0
        for piece in pieces:
            row += len(piece.tokens)
            self._advance(slots[piece.sequence], piece, row - 1)

    def _decode(self, pieces: list[Piece], slots: Mapping[int, Slot]) -> list[Piece]:
        """Decode, making room as often as it takes. Returns the pieces that are in the cache now, perhaps none."""
        while pieces:
            status = self._backend.decode(pieces)
            if status is DecodeStatus.OK:
                self._failed_steps = 0
                return pieces
            if status is DecodeStatus.NO_ROOM:
                self._counts["cache_full"] += 1
                pieces = self._make_room(pieces, slots)
                continue
            self._decode_failed([slots[piece.sequence] for piece in pieces], status)
            return []
        return []

    def _make_room(self, pieces: list[Piece], slots: Mapping[int, Slot]) -> list[Piece]:
        """What to try next: the same batch after dropping a finished sequence, else a smaller one, else a run less."""
        if self.cache.drop_one():
            return pieces
        prompts = [piece for piece in pieces if slots[piece.sequence].state is SlotState.PREFILL]
        if prompts:
            rest = [piece for piece in pieces if slots[piece.sequence].state is not SlotState.PREFILL]
            if rest:
                return rest  # those who generate go on; what they free at their end serves the prompts
            if sum(len(piece.tokens) for piece in prompts) > 1:
                return _halve(prompts)
        holding = [slot for slot in slots.values() if slot.run is not None]  # not those preempted just now
        newest = max(holding, key=lambda slot: _run(slot).submitted_at)
        if len(holding) > 1:
            sequence = _sequence(newest).id
            self._preempt(newest)
            return [piece for piece in pieces if piece.sequence != sequence]
        # Alone and still no room: this is the end of the context, whatever its nominal size.
        if newest.state is SlotState.GENERATING:
            self._end(newest, FinishReason.LENGTH, truncated=True)
        else:
            run = _run(newest)
            self._leave(newest, keep=False)
            self._fail(run, FailureKind.CONTEXT_FULL, "the cache has no room for the prompt; use a larger --ctx-size")
        return []

    def _preempt(self, slot: Slot) -> None:
        """Back to the head of the queue with all that was generated. Its state goes to host memory; without one there
        it is read again when there is room."""
        run = _run(slot)
        if run.next_token is not None:
            run.tokens = [*slot.tokens, run.next_token]
            run.next_token = None
        run.preempted = True
        run.swapped = self.cache.swap_out(_sequence(slot))
        self._counts["preempted"] += 1
        self._counts["swapped"] += run.swapped is not None
        slot.sequence = None
        slot.release(self._step)
        self._waiting.put_back(run)

    def _decode_failed(self, slots: list[Slot], status: DecodeStatus) -> None:
        self._failed_steps += 1
        for slot in slots:
            run = _run(slot)
            self._leave(slot, keep=False)
            self._fail(run, FailureKind.ENGINE, f"llama.cpp could not compute the batch ({status.name.lower()})")
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailure(f"{self._failed_steps} batches in a row could not be computed")

    # ── sample ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, slot: Slot, piece: Piece, row: int) -> None:
        """The piece is in the cache: account for it and, where it yields logits, sample."""
        run = _run(slot)
        self.cache.append(_sequence(slot), piece.tokens)
        self._counts["n_tokens_max"] = max(self._counts["n_tokens_max"], len(slot.tokens))
        now = self._now()
        if slot.state is SlotState.PREFILL:
            if run.prompt_done_at is None:
                run.n_prompt_decoded += len(piece.tokens)
            if run.job.report_progress and run.started_at is not None:
                time_ms = (now - run.started_at) * 1e3
                self._outbox.append(Progress(run.job.id, run.n_prompt, run.n_cached, len(slot.tokens), time_ms))
            if len(slot.tokens) == run.checkpoint:
                self.cache.save(_sequence(slot))
        if piece.logits is Logits.NONE:
            return
        if slot.state is SlotState.PREFILL:
            slot.state = SlotState.GENERATING
            if run.job.max_tokens == 0:
                run.prompt_done_at = now
                self._end(slot, FinishReason.LENGTH)
                return
        try:
            token = run.choose(row)
        except RequestError as error:  # a grammar that leaves no token to choose
            self._leave(slot)
            self._fail(run, FailureKind.INVALID, error.message)
            return
        events = run.accept(token, row, self._backend, self._now())
        self._outbox += events
        if events and isinstance(events[-1], Finished):
            self._close(slot)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, slot: Slot, reason: FinishReason, *, truncated: bool = False) -> None:
        self._outbox += _run(slot).end(reason, self._now(), truncated=truncated)
        self._close(slot)

    def _close(self, slot: Slot) -> None:
        run = _run(slot)
        self._leave(slot)
        self._counts["jobs_finished"] += 1
        self._account(run)

    def _leave(self, slot: Slot, *, keep: bool = True) -> None:
        """The slot is free; what its run has read stays for others, unless it is not to be kept."""
        if slot.sequence is not None:
            if keep:
                slot.left = list(slot.tokens)
                self.cache.retain(slot.sequence)
            else:
                self.cache.discard(slot.sequence)
        slot.release(self._step)

    def _cancelled(self, run: Run) -> None:
        self._outbox.append(run.fail(FailureKind.CANCELLED, "the client left", self._now()))
        self._counts["jobs_cancelled"] += 1
        self._account(run)

    def _fail(self, run: Run, kind: FailureKind, message: str) -> None:
        self._outbox.append(run.fail(kind, message, self._now()))
        self._counts["jobs_failed"] += 1
        self._account(run)

    def _account(self, run: Run) -> None:
        timings = run.timings(self._now())
        self._counts["prompt_ms"] += timings.prompt_ms
        self._counts["predicted_tokens"] += timings.predicted_n
        self._counts["predicted_ms"] += timings.predicted_ms
        run.close()


def _sequence(slot: Slot) -> CachedSequence:
    assert slot.sequence is not None
    return slot.sequence


def _run(slot: Slot) -> Run:
    assert slot.run is not None
    return slot.run


def _next_token(slot: Slot) -> int:
    token = _run(slot).next_token
    assert token is not None
    return token


def _halve(pieces: list[Piece]) -> list[Piece]:
    """The first half of the tokens of a batch of prompts; a piece that is cut yields no logits."""
    room = sum(len(piece.tokens) for piece in pieces) // 2
    half: list[Piece] = []
    for piece in pieces:
        n = min(room, len(piece.tokens))
        room -= n
        if n == len(piece.tokens):
            half.append(piece)
        elif n:
            half.append(Piece(piece.sequence, piece.start, piece.tokens[:n], Logits.NONE))
    return half
