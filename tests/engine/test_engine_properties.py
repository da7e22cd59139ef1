"""Whatever happens in whatever order, every job ends once, with the text it would have had alone."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.engine.engine import Engine
from server.engine.messages import Failed, FailureKind, Finished, Started
from tests.support.driving import Log, check_books, engine_of, job, run_to_end, text_alone
from tests.support.scripted import ScriptedBackend

N_CTX = 160

# Few letters and shared stems, so that prefixes meet.
prompts = st.builds(
    lambda stem, tail: stem + tail,
    st.sampled_from(["", "a" * 40, "a" * 70, "ab" * 20]),
    st.text(alphabet="abc", min_size=1, max_size=30),
)


class EngineMachine(RuleBasedStateMachine):
    engine: Engine
    backend: ScriptedBackend

    @initialize(
        unified=st.booleans(),
        partial_removal=st.booleans(),
        n_slots=st.integers(1, 4),
        n_batch=st.integers(4, 48),
        cont_batching=st.booleans(),
        n_spare=st.integers(0, 4),
        cache_ram_bytes=st.sampled_from([0, 700, 4000, 1 << 20]),
        idle=st.booleans(),
    )
    def start(
        self,
        unified: bool,
        partial_removal: bool,
        n_slots: int,
        n_batch: int,
        cont_batching: bool,
        n_spare: int,
        cache_ram_bytes: int,
        idle: bool,
    ) -> None:
        self.backend = ScriptedBackend(
            n_ctx=N_CTX if unified else N_CTX * n_slots,
            n_slots=n_slots,
            n_batch=n_batch,
            n_ubatch=8,
            unified=unified,
            partial_removal=partial_removal,
            n_sequences=n_slots + n_spare if unified and partial_removal else 0,
        )
        self.engine = engine_of(
            self.backend, cont_batching=cont_batching, cache_ram_bytes=cache_ram_bytes, cache_idle_slots=idle
        )
        self.log = Log()
        self.jobs: dict[int, tuple[str, int]] = {}
        self.cancelled: set[int] = set()

    @rule(prompt=prompts, max_tokens=st.integers(0, 40), slot=st.none() | st.integers(0, 3), cached=st.booleans())
    def submit(self, prompt: str, max_tokens: int, slot: int | None, cached: bool) -> None:
        job_id = len(self.jobs)
        self.jobs[job_id] = (prompt, max_tokens)
        self.engine.submit(job(job_id, prompt, max_tokens, slot=slot, cache_prompt=cached))

    @rule(prompt=prompts, n=st.integers(2, 4))
    def submit_choices(self, prompt: str, n: int) -> None:
        first = len(self.jobs)
        for job_id in range(first, first + n):
            self.jobs[job_id] = (prompt, 8)
            same = None if job_id == first else first
            self.engine.submit(job(job_id, prompt, 8, same_prompt_as=same))

    @rule(data=st.data())
    @precondition(lambda self: self.jobs)
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        if not any(isinstance(event, Finished | Failed) for event in self.log.of(job_id)):
            self.cancelled.add(job_id)
        self.engine.cancel(job_id)

    @rule(n=st.integers(1, 12))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.log.events += self.engine.step()

    @invariant()
    def the_books_agree_with_the_memory(self) -> None:
        if hasattr(self, "engine"):
            check_books(self.engine, self.backend)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        run_to_end(self.engine, self.log)
        for job_id, (prompt, max_tokens) in self.jobs.items():
            end = self.log.end(job_id)
            if isinstance(end, Failed):
                assert end.kind is FailureKind.CANCELLED
                assert job_id in self.cancelled
                continue
            alone = text_alone(prompt, max_tokens, n_ctx=N_CTX, n_slots=1, n_batch=64)
            assert self.log.text(job_id) == alone
            timings = end.timings
            assert timings.cache_n + timings.prompt_n == len(prompt)
            assert timings.predicted_n == len(alone)
        counters = self.engine.snapshot().counters
        assert counters.jobs_submitted == counters.jobs_finished + counters.jobs_cancelled + counters.jobs_failed
        assert counters.cache_mismatches == counters.states_refused == 0
        assert self.backend.n_open_samplers == 0
        assert sum(isinstance(event, Started) for event in self.log.events) <= len(self.jobs)


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngine = EngineMachine.TestCase
