"""server/ops/metrics.py: what a scrape says, and that docs/metrics.md lists exactly that."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.client import EngineState, EngineStatus
from server.engine.messages import Counters, ModelFacts, SlotState, SlotView, Snapshot, Timings
from server.ops.metrics import CONTENT_TYPE, Metrics
from server.ops.record import RequestRecord

READY = EngineStatus(EngineState.READY)
DOC = Path(__file__).parents[2] / "docs" / "metrics.md"

FACTS = ModelFacts(
    description="glm-dsa 1B Q8_0",
    architecture="glm-dsa",
    n_ctx=4096,
    n_ctx_seq=2048,
    n_ctx_train=8192,
    n_slots=3,
    n_batch=512,
    n_ubatch=512,
    n_vocab=1000,
    vocab_type=2,
    n_embd=64,
    n_params=1_000_000,
    size_bytes=1_000_000,
    ftype="Q8_0",
    kv_unified=True,
    split_mode="layer",
    n_gpu_layers=0,
    devices=[],
    chat_template=None,
    bos_text="",
    eos_text="",
    adds_bos=False,
    control_texts=[],
    build_info="b1-abc",
)
COUNTERS = Counters(
    n_decode=10,
    n_busy_slots=25,
    prompt_tokens=300,
    prompt_cached_tokens=50,
    prompt_ms=1500.0,
    predicted_tokens=80,
    predicted_ms=4000.0,
    jobs_submitted=9,
    jobs_finished=5,
    jobs_failed=1,
    jobs_cancelled=2,
    cache_full=3,
    preempted=4,
    evicted=6,
    swapped=3,
    cached_tokens_host=12,
    follower_waits=11,
    rereads_uncuttable=12,
    cache_mismatches=13,
    states_saved=14,
    states_refused=15,
    n_tokens_max=777,
)
CHAT = RequestRecord(
    route="/v1/chat/completions",
    status=200,
    duration_ms=1500.0,
    ttft_ms=300.0,
    timings=(Timings(cache_n=10, prompt_n=90, predicted_n=40, queue_ms=20.0),),
)


def snapshot(counters: Counters = COUNTERS) -> Snapshot:
    states = (SlotState.GENERATING, SlotState.PREFILL, SlotState.IDLE)
    return Snapshot(
        slots=[SlotView(id=number, state=state, n_ctx=2048) for number, state in enumerate(states)],
        n_waiting=7,
        counters=counters,
        cells_total=4096,
        cells_used=1234,
        step_ms=32.0,
        prefill_tokens_per_s=222.5,
        cells_retained=100,
        cells_shared=200,
        n_retained=3,
        host_cache_bytes=5000,
        host_cache_limit_bytes=9000,
        host_cache_entries=4,
    )


Labels = frozenset[tuple[str, str]]


def scrape(
    metrics: Metrics, last: Snapshot | None = None, status: EngineStatus = READY, facts: ModelFacts | None = FACTS
) -> dict[tuple[str, Labels], float]:
    """Parsed by the client library's own parser: (series, labels) to value."""
    families = text_string_to_metric_families(metrics.render(last, status, facts).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: dict[tuple[str, Labels], float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_llama_cpp_s_series() -> None:
    samples = scrape(Metrics(), snapshot())
    got = {name.partition(":")[2]: number for (name, _), number in samples.items() if name.startswith("llamacpp:")}
    assert got == {
        "prompt_tokens_total": 300,
        "prompt_tokens_cached_total": 50,
        "prompt_seconds_total": 1.5,
        "tokens_predicted_total": 80,
        "tokens_predicted_seconds_total": 4,
        "n_decode_total": 10,
        "n_tokens_max": 777,
        "prompt_tokens_seconds": 200,
        "predicted_tokens_seconds": 20,
        "n_busy_slots_per_decode": 2.5,
        "requests_processing": 2,
        "requests_deferred": 7,
    }


def test_the_engine_s_series() -> None:
    samples = scrape(Metrics(), snapshot(), EngineStatus(EngineState.STOPPING, restarts=2))
    assert value(samples, "glmserve_slots", state="generating") == 1
    assert value(samples, "glmserve_slots", state="prefill") == 1
    assert value(samples, "glmserve_slots", state="idle") == 1
    assert value(samples, "glmserve_slots", state="waiting") == 0
    assert value(samples, "glmserve_queue_depth") == 7
    assert value(samples, "glmserve_cache_cells") == 4096
    assert value(samples, "glmserve_cache_cells_used") == 1234
    assert value(samples, "glmserve_context_tokens") == 2048
    assert value(samples, "glmserve_step_seconds") == 0.032
    assert value(samples, "glmserve_prefill_tokens_per_second") == 222.5
    assert value(samples, "glmserve_cache_full_total") == 3
    assert value(samples, "glmserve_preemptions_total") == 4
    assert value(samples, "glmserve_cache_evictions_total") == 6
    assert value(samples, "glmserve_swaps_total") == 3
    assert value(samples, "glmserve_cached_prompt_tokens_total", tier="cells") == 38
    assert value(samples, "glmserve_cached_prompt_tokens_total", tier="host") == 12
    assert value(samples, "glmserve_follower_waits_total") == 11
    assert value(samples, "glmserve_rereads_uncuttable_total") == 12
    assert value(samples, "glmserve_cache_mismatches_total") == 13
    assert value(samples, "glmserve_states_saved_total") == 14
    assert value(samples, "glmserve_states_refused_total") == 15
    assert value(samples, "glmserve_cache_cells_retained") == 100
    assert value(samples, "glmserve_cache_cells_shared") == 200
    assert value(samples, "glmserve_cache_sequences_retained") == 3
    assert value(samples, "glmserve_host_cache_bytes") == 5000
    assert value(samples, "glmserve_host_cache_limit_bytes") == 9000
    assert value(samples, "glmserve_host_cache_entries") == 4
    assert value(samples, "glmserve_jobs_submitted_total") == 9
    outcomes = ("finished", "failed", "cancelled")
    assert [value(samples, "glmserve_jobs_ended_total", outcome=outcome) for outcome in outcomes] == [5, 1, 2]
    assert value(samples, "glmserve_engine_restarts_total") == 2
    states = {state: value(samples, "glmserve_engine_state", state=state) for state in EngineState}
    assert states == {state: float(state is EngineState.STOPPING) for state in EngineState}


def test_requests_are_counted_by_route_and_status() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.request_started("/v1/chat/completions")
    metrics.request_finished(CHAT)
    metrics.request_finished(dataclasses.replace(CHAT, status=499, disconnected=True, timings=(), ttft_ms=None))
    samples = scrape(metrics)
    route = "/v1/chat/completions"
    assert value(samples, "glmserve_http_requests_total", route=route, status="200") == 1
    assert value(samples, "glmserve_http_requests_total", route=route, status="499") == 1
    assert value(samples, "glmserve_http_requests_running", route=route) == 1
    assert value(samples, "glmserve_client_disconnects_total") == 1


def test_histograms_take_only_requests_that_generated() -> None:
    metrics = Metrics()
    for record in (CHAT, RequestRecord(route="/v1/models", status=200, duration_ms=1.0)):
        metrics.request_started(record.route)
        metrics.request_finished(record)
    samples = scrape(metrics)
    expected = {
        "queue_seconds": (0.02, "0.05", "0.01"),
        "time_to_first_token_seconds": (0.3, "0.5", "0.25"),
        "request_seconds": (1.5, "2.5", "1.0"),
        "request_prompt_tokens": (100, "256.0", "64.0"),
        "request_generated_tokens": (40, "128.0", "32.0"),
    }
    for name, (total, inside, below) in expected.items():
        assert value(samples, f"glmserve_{name}_count") == 1
        assert value(samples, f"glmserve_{name}_sum") == pytest.approx(total)
        assert value(samples, f"glmserve_{name}_bucket", le=inside) == 1
        assert value(samples, f"glmserve_{name}_bucket", le=below) == 0
        assert value(samples, f"glmserve_{name}_bucket", le="+Inf") == 1


def test_a_value_on_a_bound_is_within_it_and_one_above_all_is_in_the_last() -> None:
    metrics = Metrics()
    metrics.gap(50.0)
    metrics.gap(10 * 60e3)
    samples = scrape(metrics)
    assert value(samples, "glmserve_inter_token_seconds_bucket", le="0.03") == 0
    assert value(samples, "glmserve_inter_token_seconds_bucket", le="0.05") == 1
    assert value(samples, "glmserve_inter_token_seconds_bucket", le="15.0") == 1
    assert value(samples, "glmserve_inter_token_seconds_bucket", le="+Inf") == 2


def test_open_streams_go_down_also_when_sending_fails() -> None:
    metrics = Metrics()
    with metrics.open_stream():
        assert value(scrape(metrics), "glmserve_open_streams") == 1
        with pytest.raises(ConnectionError), metrics.open_stream():
            raise ConnectionError
    assert value(scrape(metrics), "glmserve_open_streams") == 0


def test_counters_go_on_when_a_new_engine_starts_at_zero() -> None:
    metrics = Metrics()
    scrape(metrics, snapshot())
    restarting = EngineStatus(EngineState.RESTARTING, restarts=1)
    down = scrape(metrics, snapshot(), restarting)  # the dead engine's last snapshot is still handed in
    assert value(down, "llamacpp:prompt_tokens_total") == 300
    assert value(down, "glmserve_slots", state="generating") == 0
    assert value(down, "glmserve_queue_depth") == 0
    metrics.observe(snapshot(Counters()))
    again = scrape(metrics, snapshot(Counters(prompt_tokens=5, n_tokens_max=20)))
    assert value(again, "llamacpp:prompt_tokens_total") == 305
    assert value(again, "llamacpp:n_tokens_max") == 777
    assert value(again, "glmserve_jobs_submitted_total") == 9
    third = scrape(metrics, snapshot(Counters(prompt_tokens=1)))
    assert value(third, "llamacpp:prompt_tokens_total") == 306


def test_before_the_model_is_loaded() -> None:
    loading = EngineStatus(EngineState.LOADING, phase="loading the model", progress=0.25)
    samples = scrape(Metrics(), None, loading, None)
    assert value(samples, "glmserve_engine_load_progress") == 0.25
    assert value(samples, "glmserve_engine_state", state="loading") == 1
    assert value(samples, "llamacpp:prompt_tokens_seconds") == 0
    assert value(samples, "llamacpp:n_busy_slots_per_decode") == 0
    assert value(samples, "glmserve_cache_cells") == 0


def test_label_values_are_escaped() -> None:
    odd = 'a "quoted" \\ name\nwith a line'
    samples = scrape(Metrics(), facts=msgspec.structs.replace(FACTS, description=odd))
    (labels,) = [dict(labels) for name, labels in samples if name == "glmserve_info"]
    assert labels["model"] == odd


def test_the_content_type_names_the_format() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def test_the_page_lists_every_series_and_no_other() -> None:
    metrics = Metrics()
    metrics.request_started(CHAT.route)
    metrics.request_finished(CHAT)
    text = metrics.render(snapshot(), READY, FACTS).decode()
    written = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    listed = dict(re.findall(r"^\| `([\w:]+)` \| (\w+) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == written
