"""server/ops/bench/measures.py and report.py: arithmetic on moments, and how it is shown."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.ops.bench.measures import Answer, Run, Summary, quantile, summarize
from server.ops.bench.report import json_lines, ratios, table


def answer(*deltas_s: float, sent_s: float = 10.0, n_generated: int | None = None) -> Answer:
    return Answer(
        sent_s=sent_s,
        ended_s=(deltas_s[-1] if deltas_s else sent_s) + 1.0,
        deltas_s=deltas_s,
        n_prompt=20,
        n_cached=5,
        n_generated=len(deltas_s) if n_generated is None else n_generated,
    )


def test_an_answer_s_times() -> None:
    it = answer(10.5, 10.6, 10.9)
    assert it.ttft_ms == pytest.approx(500)
    assert it.gaps_ms == pytest.approx([100, 300])
    assert it.tpot_ms == pytest.approx(200)


def test_time_per_token_counts_tokens_not_pieces() -> None:
    assert answer(10.5, 10.9, n_generated=5).tpot_ms == pytest.approx(100)


def test_an_answer_without_text_is_timed_to_its_end() -> None:
    it = answer()
    assert it.ttft_ms == pytest.approx(1000)
    assert it.gaps_ms == []
    assert it.tpot_ms is None
    assert answer(10.5).tpot_ms is None


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)])
def test_quantile_is_linear_between_ranks(share: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(expected)


def test_quantile_of_nothing() -> None:
    assert quantile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=2))
def test_quantile_agrees_with_the_standard_library(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")
    assert [quantile(values, number / 100) for number in range(1, 100)] == pytest.approx(expected)
    assert quantile(values, 1.0) == max(values)


def summary(server: str = "ours", scale: float = 1.0) -> Summary:
    runs = [
        Run(
            (answer(10.0 + 0.5 * scale, 10.0 + 0.6 * scale), answer(10.0 + 0.7 * scale, 10.0 + 1.0 * scale)),
            2.0 * scale,
        ),
        Run((answer(10.0 + 0.1 * scale), answer(10.0 + 0.3 * scale)), 4.0 * scale, late=answer(10.0 + 2.0 * scale)),
    ]
    return summarize("mix", server, runs)


def test_a_summary_pools_the_passages() -> None:
    it = summary()
    assert (it.rounds, it.requests) == (2, 5)
    assert it.wall_s == pytest.approx(3.0)
    assert (it.prompt_tokens, it.cached_tokens, it.generated_tokens) == (100, 25, 7)
    assert it.tokens_per_s == pytest.approx(7 / 6)
    assert it.ttft_p50_ms == pytest.approx(400)
    assert it.itl_p50_ms == pytest.approx(200)
    assert it.itl_max_ms == pytest.approx(300)
    assert it.tpot_ms == pytest.approx(200)
    assert it.late_ttft_ms == pytest.approx(2000)


def test_ratios_are_ours_by_theirs() -> None:
    got = ratios(summary(), summary("theirs", scale=2.0))
    assert got["wall_s"] == pytest.approx(0.5)
    assert got["itl_max_ms"] == pytest.approx(0.5)
    assert got["tokens_per_s"] == pytest.approx(2.0)


def test_no_ratio_without_a_number_on_both_sides() -> None:
    alone = summarize("prefill", "x", [Run((answer(10.5),), 1.0)])
    assert ratios(alone, summary())["itl_p50_ms"] is None
    assert ratios(summary(), alone)["late_ttft_ms"] is None


def test_the_table_of_one_server() -> None:
    heading, row = table([[summary()]]).splitlines()
    assert heading.split() == "workload server wall s tok/s ttft p50 p95 tpot itl p50 p95 p99 max late ttft".split()
    assert row.split() == [
        "mix",
        "ours",
        "3.00",
        "1.2",
        "400",
        "670",
        "200.0",
        "200.0",
        "290.0",
        "298.0",
        "300",
        "2000",
    ]


def test_the_table_of_two_servers_has_ratios_and_straight_columns() -> None:
    lines = table([[summary(), summary("http://theirs", scale=2.0)]]).splitlines()
    assert [line.split()[0] for line in lines] == ["workload", "mix", "http://theirs", "ratio"]
    assert lines[3].split() == ["ratio", "0.50", "2.00", *["0.50"] * 8]
    assert len({len(line) for line in lines}) == 1


def test_json_lines() -> None:
    ours, theirs, ratio = map(json.loads, json_lines([[summary(), summary("theirs", scale=2.0)]]).splitlines())
    assert (ours["workload"], ours["server"], theirs["server"]) == ("mix", "ours", "theirs")
    assert ratio["ratio"]["wall_s"] == pytest.approx(0.5)
