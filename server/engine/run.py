"""One job on its way through the engine: its clocks, its text, its next token. Knows nothing of slots and batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.backend import Backend, Sampler
from server.engine.block_limit import BlockCounter
from server.engine.disk_tier import DiskEntry
from server.engine.host_tier import Entry
from server.engine.messages import (
    Divergence,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Job,
    Text,
    Timings,
    TokenLogprob,
)
from server.engine.text import TextStream


@dataclass(slots=True)
class Run:
    """`tokens` must be in the cache before the next one can be sampled: the prompt, and after a preemption what had
    been generated as well. Clock values are seconds of one monotonic clock, None until they are known."""

    job: Job
    submitted_at: float
    tokens: list[int]
    text: TextStream
    block: BlockCounter | None = None
    sampler: Sampler | None = None
    next_token: int | None = None  # sampled, not yet decoded
    n_cached: int = 0
    n_prompt_decoded: int = 0
    n_generated: int = 0
    preempted: bool = False
    divergence: Divergence | None = None
    swapped: Entry | None = None  # its state while it waits to come back
    reads: list[DiskEntry] | None = None  # what was asked from disk for it; None: it was not looked up yet
    checkpoint: int = 0  # tokens after which the state is worth keeping, where it cannot be cut later; 0: nowhere
    started_at: float | None = None  # first batch
    prompt_done_at: float | None = None
    last_token_at: float | None = None
    _unsent: list[int] = field(default_factory=list)
    _unsent_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, now: float) -> Run:
        block = None if job.block_limit is None else BlockCounter(job.block_limit)
        return cls(job, now, list(job.tokens), TextStream(job.stop), block)

    @property
    def waits_for_disk(self) -> bool:
        return any(entry.reading for entry in self.reads or ())

    @property
    def n_prompt(self) -> int:
        return len(self.job.tokens)

    def timings(self, now: float) -> Timings:
        started = self.started_at
        prompt_end = self.prompt_done_at if self.prompt_done_at is not None else now
        return Timings(
            cache_n=self.n_cached,
            prompt_n=self.n_prompt_decoded,
            prompt_ms=(prompt_end - started) * 1e3 if started is not None else 0.0,
            predicted_n=self.n_generated,
            predicted_ms=self.predicted_ms,
            queue_ms=((started if started is not None else now) - self.submitted_at) * 1e3,
        )

    @property
    def predicted_ms(self) -> float:
        if self.prompt_done_at is None or self.last_token_at is None:
            return 0.0
        return max(1e-3, (self.last_token_at - self.prompt_done_at) * 1e3)

    def choose(self, row: int) -> int:
        """The next token, from the logits of `row` or by force. Raises RequestError when a grammar leaves none."""
        assert self.sampler is not None
        if self.block is None:
            return self.sampler.sample(row)
        token = self.block.forced(within_character=self.text.within_character)
        if token is None:
            token = self.sampler.sample(row)
        else:
            self.sampler.force(row, token)
        self.block.note(token)
        return token

    def accept(self, token: int, row: int, backend: Backend, now: float) -> list[Text | Finished]:
        """Take a sampled token: the text that became final with it, and Finished when it was the last."""
        if self.prompt_done_at is None:
            self.prompt_done_at = now
        self.last_token_at = now
        self.n_generated += 1
        self.next_token = token
        job = self.job
        if backend.is_end(token) and not job.sampling.ignore_eos:
            # It is counted, but neither its text nor its log-probability is part of the answer.
            return self.end(FinishReason.END_OF_TURN, now)
        self._unsent.append(token)
        if job.n_logprobs is not None and self.sampler is not None:
            self._unsent_logprobs.append(self.sampler.logprobs(row, token, job.n_logprobs))
        piece = self.text.feed(backend.piece(token, show_special=job.show_special))
        events = self._release(piece.text, piece.n_tokens, now)
        if piece.stop_text is not None:
            return [*events, Finished(job.id, FinishReason.STOP_TEXT, self.timings(now), stop_text=piece.stop_text)]
        if 0 <= job.max_tokens <= self.n_generated or self._out_of_time():
            return [*events, *self.end(FinishReason.LENGTH, now)]
        return events

    def end(self, reason: FinishReason, now: float, *, truncated: bool = False) -> list[Text | Finished]:
        """Finish: what was held back is text now."""
        rest = self.text.finish()
        events = self._release(rest.text, len(self._unsent), now)
        return [*events, Finished(self.job.id, reason, self.timings(now), truncated=truncated)]

    def fail(self, kind: FailureKind, message: str, now: float) -> Failed:
        return Failed(self.job.id, kind, message, self.timings(now))

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None
        if self.swapped is not None:
            self.swapped.pinned = False
            self.swapped = None

    def _out_of_time(self) -> bool:
        return self.job.time_limit_ms is not None and self.predicted_ms >= self.job.time_limit_ms

    def _release(self, text: str, n_tokens: int, now: float) -> list[Text | Finished]:
        if not text and not n_tokens:
            return []
        tokens, self._unsent = self._unsent[:n_tokens], self._unsent[n_tokens:]
        logprobs, self._unsent_logprobs = self._unsent_logprobs[:n_tokens], self._unsent_logprobs[n_tokens:]
        return [Text(self.job.id, text, tokens, self.timings(now), logprobs)]
