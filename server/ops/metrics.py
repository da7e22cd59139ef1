"""What GET /metrics shows. docs/metrics.md lists every series; a test holds the two together.

Series named `llamacpp:` are llama.cpp's own, so that its dashboards work; the rest is `glmserve_`. Engine counters
come from the last snapshot and stay monotone over an engine restart; the others are counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

import server
from server.engine.backlog import Load
from server.engine.client import EngineState, EngineStatus
from server.engine.messages import Counters, ModelFacts, SlotState, Snapshot
from server.ops.carry import CounterCarry
from server.ops.histogram import Histogram
from server.ops.record import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_ENGINE_IS_THERE = frozenset({EngineState.READY, EngineState.STOPPING})

_REFUSALS = ("queue_full", "queue_timeout")  # error codes: what a busy server refuses
_MOST_KEYS = 100  # that get series of their own
_OTHER_KEYS = "other"
_NO_KEY = "none"  # of servers that ask for none

_SECONDS_TO_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SECONDS_BETWEEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
_SECONDS_QUEUED = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)
_SECONDS_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_TOKENS_PROMPT = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0, 1048576.0)
_TOKENS_GENERATED = (1.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0)


class Metrics:
    """Counts requests as they come and go, and renders the text of a scrape. Not thread-safe: the event loop's own."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """`keys`: the names of the server's API keys."""
        self._keys = tuple(keys[:_MOST_KEYS])
        self._refused: Counter[tuple[str, str]] = Counter()
        self._engine = CounterCarry()
        self._process = ProcessCollector(registry=None)
        self._finished: Counter[tuple[str, int]] = Counter()
        self._running: Counter[str] = Counter()
        self._disconnects = 0
        self._normalized = 0
        self._open_streams = 0
        self._to_first = Histogram(_SECONDS_TO_FIRST)
        self._between = Histogram(_SECONDS_BETWEEN)
        self._queued = Histogram(_SECONDS_QUEUED)
        self._whole = Histogram(_SECONDS_WHOLE)
        self._prompt = Histogram(_TOKENS_PROMPT)
        self._generated = Histogram(_TOKENS_GENERATED)

    def request_started(self, route: str) -> None:
        """`route` as RequestRecord has it: a pattern, so that clients cannot make up series."""
        self._running[route] += 1

    def request_finished(self, record: RequestRecord) -> None:
        """Once for every `request_started`, however the request ended."""
        self._running[record.route] -= 1
        self._finished[record.route, record.status] += 1
        self._disconnects += record.disconnected
        self._normalized += record.normalized
        if record.error_code in _REFUSALS:
            self._refused[self._label(record.key_label), record.error_code] += 1
        if not record.timings:
            return
        self._whole.observe(record.duration_ms / 1e3)
        if record.ttft_ms is not None:
            self._to_first.observe(record.ttft_ms / 1e3)
        for timings in record.timings:
            self._queued.observe(timings.queue_ms / 1e3)
            self._prompt.observe(timings.cache_n + timings.prompt_n)
            self._generated.observe(timings.predicted_n)

    def gap(self, milliseconds: float) -> None:
        """Time between two pieces of text of one answer, as its client saw it."""
        self._between.observe(milliseconds / 1e3)

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """Around the sending of an event stream."""
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    def observe(self, snapshot: Snapshot) -> None:
        """Call it with every snapshot: what an engine counted after the last one seen is lost when it dies."""
        self._engine.observe(snapshot.counters)

    def render(
        self,
        snapshot: Snapshot | None,
        status: EngineStatus,
        facts: ModelFacts | None,
        loads: Mapping[str, Load] | None = None,
    ) -> bytes:
        """Text in Prometheus' format 0.0.4 (CONTENT_TYPE). Gauges about an engine that is not there say 0. `loads`:
        open jobs by owner."""
        if snapshot is not None:
            self.observe(snapshot)
        if status.state not in _ENGINE_IS_THERE:
            snapshot = None  # the last word of an engine that is gone
        return generate_latest(_Families(self._families(snapshot, status, facts, loads or {})))

    def _families(
        self,
        snapshot: Snapshot | None,
        status: EngineStatus,
        facts: ModelFacts | None,
        loads: Mapping[str, Load],
    ) -> Iterator[Metric]:
        counters = self._engine.total()
        yield from _llama_cpp(counters, snapshot)
        yield from _about_engine(counters, snapshot, status, facts)
        yield from self._about_keys(loads)
        yield from self._about_http()
        yield from self._process.collect()

    def _about_keys(self, loads: Mapping[str, Load]) -> Iterator[Metric]:
        labels = [*(self._keys or (_NO_KEY,)), *([_OTHER_KEYS] if len(self._keys) == _MOST_KEYS else [])]
        jobs: Counter[tuple[str, str]] = Counter()
        for owner, load in loads.items():
            jobs[self._label(owner), "waiting"] += load.waiting
            jobs[self._label(owner), "running"] += load.running
        family = GaugeMetricFamily("glmserve_jobs", "Open jobs by API key.", labels=["key", "state"])
        for label in labels:
            for state in ("waiting", "running"):
                family.add_metric([label, state], jobs[label, state])
        yield family
        refused = CounterMetricFamily(
            "glmserve_requests_refused", "Requests that a busy server refused.", labels=["key", "reason"]
        )
        for label in labels:
            for reason in _REFUSALS:
                refused.add_metric([label, reason], self._refused[label, reason])
        yield refused

    def _label(self, key: str) -> str:
        """The name of a key as label; there are only so many."""
        if not key:
            return _NO_KEY
        return key if key in self._keys else _OTHER_KEYS

    def _about_http(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "glmserve_http_requests", "Finished requests by route and status.", labels=["route", "status"]
        )
        for (route, code), count in sorted(self._finished.items()):
            finished.add_metric([route, str(code)], count)
        yield finished
        running = GaugeMetricFamily("glmserve_http_requests_running", "Requests being served.", labels=["route"])
        for route, count in sorted(self._running.items()):
            running.add_metric([route], count)
        yield running
        yield _gauge("glmserve_open_streams", "Event streams being sent.", self._open_streams)
        yield _counter("glmserve_client_disconnects", "Clients that left before their answer.", self._disconnects)
        yield _counter(
            "glmserve_prompts_normalized",
            "Prompts without a line that changes with each request.",
            self._normalized,
        )
        yield _histogram("glmserve_queue_seconds", "Submitted to first batch.", self._queued)
        yield _histogram("glmserve_time_to_first_token_seconds", "Arrival to first delta.", self._to_first)
        yield _histogram("glmserve_inter_token_seconds", "Between two pieces of one answer.", self._between)
        yield _histogram("glmserve_request_seconds", "Arrival to end, of requests that generate.", self._whole)
        yield _histogram("glmserve_request_prompt_tokens", "Prompt tokens, cached ones included.", self._prompt)
        yield _histogram("glmserve_request_generated_tokens", "Generated tokens.", self._generated)


class _Families(Collector):
    """Hands families that are ready to `generate_latest`."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


def _llama_cpp(counters: Counters, snapshot: Snapshot | None) -> Iterator[Metric]:
    """The names of llama.cpp's tools/server. Its `n_tokens_max` is a high-water mark, hence a gauge here."""
    prompt_s, predicted_s = counters.prompt_ms / 1e3, counters.predicted_ms / 1e3
    yield _counter("llamacpp:prompt_tokens", "Prompt tokens decoded, cached ones excluded.", counters.prompt_tokens)
    yield _counter("llamacpp:prompt_tokens_cached", "Prompt tokens reused.", counters.prompt_cached_tokens)
    yield _counter("llamacpp:prompt_seconds", "Time spent on prompts.", prompt_s)
    yield _counter("llamacpp:tokens_predicted", "Tokens generated.", counters.predicted_tokens)
    yield _counter("llamacpp:tokens_predicted_seconds", "Time spent generating.", predicted_s)
    yield _counter("llamacpp:n_decode", "llama_decode calls.", counters.n_decode)
    yield _gauge("llamacpp:n_tokens_max", "Most tokens one sequence held.", counters.n_tokens_max)
    yield _gauge(
        "llamacpp:prompt_tokens_seconds", "Mean prompt tokens a second.", _ratio(counters.prompt_tokens, prompt_s)
    )
    yield _gauge(
        "llamacpp:predicted_tokens_seconds",
        "Mean generated tokens a second and request.",
        _ratio(counters.predicted_tokens, predicted_s),
    )
    yield _gauge(
        "llamacpp:n_busy_slots_per_decode",
        "Mean slots in a llama_decode call.",
        _ratio(counters.n_busy_slots, counters.n_decode),
    )
    busy = 0 if snapshot is None else sum(slot.state is not SlotState.IDLE for slot in snapshot.slots)
    yield _gauge("llamacpp:requests_processing", "Jobs in slots.", busy)
    yield _gauge("llamacpp:requests_deferred", "Jobs that wait for a slot.", snapshot.n_waiting if snapshot else 0)


def _about_engine(
    counters: Counters, snapshot: Snapshot | None, status: EngineStatus, facts: ModelFacts | None
) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "glmserve_info",
        "Always 1; what runs is in the labels.",
        labels=["version", "llama_cpp", "architecture", "model"],
    )
    labels = (facts.build_info, facts.architecture, facts.description) if facts else ("", "", "")
    info.add_metric([server.__version__, *labels], 1)
    yield info

    states = GaugeMetricFamily("glmserve_engine_state", "1 for the state the engine is in.", labels=["state"])
    for state in EngineState:
        states.add_metric([state.value], float(state is status.state))
    yield states
    yield _gauge("glmserve_engine_load_progress", "0 to 1 while a model loads.", status.progress or 0.0)
    yield _counter("glmserve_engine_restarts", "Engine processes started after the first.", status.restarts)

    slots = GaugeMetricFamily("glmserve_slots", "Slots by state.", labels=["state"])
    in_state = Counter(slot.state for slot in snapshot.slots) if snapshot else Counter[SlotState]()
    for slot_state in SlotState:
        slots.add_metric([slot_state.value], in_state[slot_state])
    yield slots
    yield _gauge("glmserve_queue_depth", "Jobs that wait for a slot.", snapshot.n_waiting if snapshot else 0)
    yield _gauge(
        "glmserve_cache_cells", "Cells of the KV cache, all together.", snapshot.cells_total if snapshot else 0
    )
    yield _gauge("glmserve_cache_cells_used", "Cells that hold a token.", snapshot.cells_used if snapshot else 0)
    yield _gauge(
        "glmserve_cache_cells_shared",
        "Cells that more than one sequence holds.",
        snapshot.cells_shared if snapshot else 0,
    )
    yield _gauge(
        "glmserve_cache_cells_retained",
        "Cells that only finished sequences hold.",
        snapshot.cells_retained if snapshot else 0,
    )
    yield _gauge(
        "glmserve_cache_sequences_retained",
        "Finished sequences that still hold cells.",
        snapshot.n_retained if snapshot else 0,
    )
    yield _gauge(
        "glmserve_host_cache_bytes", "States kept in host memory.", snapshot.host_cache_bytes if snapshot else 0
    )
    yield _gauge(
        "glmserve_host_cache_limit_bytes", "Limit of the above.", snapshot.host_cache_limit_bytes if snapshot else 0
    )
    yield _gauge(
        "glmserve_host_cache_entries", "Number of these states.", snapshot.host_cache_entries if snapshot else 0
    )
    yield from _memory(facts)
    yield _gauge(
        "glmserve_disk_cache_bytes", "States on disk (--cache-disk).", snapshot.disk_cache_bytes if snapshot else 0
    )
    yield _gauge(
        "glmserve_disk_cache_limit_bytes", "Limit of the above.", snapshot.disk_cache_limit_bytes if snapshot else 0
    )
    yield _gauge(
        "glmserve_disk_cache_entries",
        "States on disk that this model and its settings can use.",
        snapshot.disk_cache_entries if snapshot else 0,
    )
    yield _gauge(
        "glmserve_disk_cache_pending",
        "1 while something that is finished is still to be written.",
        float(snapshot.disk_cache_pending) if snapshot else 0.0,
    )
    yield _gauge("glmserve_context_tokens", "Tokens one request may use.", facts.n_ctx_seq if facts else 0)
    yield _gauge("glmserve_step_seconds", "Length of the last step.", snapshot.step_ms / 1e3 if snapshot else 0.0)
    yield _gauge(
        "glmserve_prefill_tokens_per_second",
        "Measured speed of reading prompts, which sizes the chunks.",
        snapshot.prefill_tokens_per_s if snapshot else 0.0,
    )
    yield _counter("glmserve_cache_full", "llama_decode calls that found no room.", counters.cache_full)
    yield _counter("glmserve_cache_evictions", "Finished sequences that lost their cells.", counters.evicted)
    yield _counter("glmserve_preemptions", "Jobs put back into the queue for room.", counters.preempted)
    yield _counter("glmserve_swaps", "Of these, jobs whose state went to host memory.", counters.swapped)
    hits = CounterMetricFamily("glmserve_cached_prompt_tokens", "Prompt tokens not read again.", labels=["tier"])
    from_elsewhere = counters.cached_tokens_host + counters.cached_tokens_disk
    hits.add_metric(["cells"], counters.prompt_cached_tokens - from_elsewhere)
    hits.add_metric(["host"], counters.cached_tokens_host)
    hits.add_metric(["disk"], counters.cached_tokens_disk)
    yield hits
    yield _counter(
        "glmserve_follower_waits", "Jobs that waited for another to read what both need.", counters.follower_waits
    )
    yield _counter(
        "glmserve_rereads_uncuttable",
        "Prompts read again because a state could not be cut where they part.",
        counters.rereads_uncuttable,
    )
    yield _counter(
        "glmserve_cache_mismatches",
        "Sequences dropped because the memory disagreed with the tokens noted.",
        counters.cache_mismatches,
    )
    yield _counter("glmserve_states_saved", "States copied to host memory.", counters.states_saved)
    yield _counter("glmserve_states_refused", "States that were damaged or not taken back.", counters.states_refused)
    yield _counter("glmserve_disk_states_written", "States written to disk.", counters.disk_written)
    yield _counter("glmserve_disk_states_refused", "Files on disk that were damaged.", counters.disk_refused)
    yield _counter("glmserve_disk_failures", "Files that could not be written or read.", counters.disk_failed)
    yield _counter("glmserve_jobs_submitted", "Jobs the engine took.", counters.jobs_submitted)
    ended = CounterMetricFamily("glmserve_jobs_ended", "Jobs that ended, by how.", labels=["outcome"])
    ended.add_metric(["finished"], counters.jobs_finished)
    ended.add_metric(["failed"], counters.jobs_failed)
    ended.add_metric(["cancelled"], counters.jobs_cancelled)
    yield ended


def _memory(facts: ModelFacts | None) -> Iterator[Metric]:
    planned = GaugeMetricFamily(
        "glmserve_memory_planned_bytes", "Weights, cache and buffers, as planned before the load.", labels=["device"]
    )
    actual = GaugeMetricFamily(
        "glmserve_memory_actual_bytes", "Weights, cache and buffers, as llama.cpp holds them.", labels=["device"]
    )
    for memory in facts.memory if facts else ():
        planned.add_metric([memory.device], memory.planned_bytes)
        if memory.actual_bytes is not None:
            actual.add_metric([memory.device], memory.actual_bytes)
    yield planned
    yield actual


def _counter(name: str, text: str, value: float) -> Metric:
    """The client library adds `_total`."""
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=list(histogram.cumulative()), sum_value=histogram.sum)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
