from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.render.parts import LEAST_LOGPROB, finish_reason, timings, to_json, token_probabilities
from server.engine.messages import FinishReason, Timings, TokenLogprob, TopToken

counts = st.integers(0, 10**7)
times = st.floats(0, 1e9)


def test_timings_have_every_field_and_the_first_token_does_not_count_in_the_rate() -> None:
    shown = timings(Timings(cache_n=3, prompt_n=10, prompt_ms=50.0, predicted_n=5, predicted_ms=80.0, queue_ms=7.0))
    assert shown == {
        "cache_n": 3,
        "prompt_n": 10,
        "prompt_ms": 50.0,
        "prompt_per_token_ms": 5.0,
        "prompt_per_second": 200.0,
        "predicted_n": 5,
        "predicted_ms": 80.0,
        "predicted_per_token_ms": 20.0,
        "predicted_per_second": 50.0,
    }


def test_drafts_are_shown_only_where_there_were_some() -> None:
    assert timings(Timings(draft_n=4, draft_n_accepted=3)).items() >= {"draft_n": 4, "draft_n_accepted": 3}.items()
    assert "draft_n_accepted" not in timings(Timings())


@given(counts, counts, times, counts, times)
def test_rates_are_always_finite(cache_n: int, prompt_n: int, prompt_ms: float, predicted_n: int, ms: float) -> None:
    shown = timings(Timings(cache_n, prompt_n, prompt_ms, predicted_n, ms))
    assert all(math.isfinite(value) and value >= 0 for value in shown.values())


@pytest.mark.parametrize("predicted_n", [0, 1])
def test_without_a_second_token_there_is_no_rate(predicted_n: int) -> None:
    shown = timings(Timings(prompt_n=4, prompt_ms=1.0, predicted_n=predicted_n, predicted_ms=0.001 * predicted_n))
    assert (shown["predicted_per_token_ms"], shown["predicted_per_second"]) == (0.0, 0.0)


def test_a_cut_wins_over_calls() -> None:
    assert finish_reason(FinishReason.LENGTH, has_tool_calls=True) == "length"
    assert finish_reason(FinishReason.STOP_TEXT, has_tool_calls=True) == "tool_calls"
    assert finish_reason(FinishReason.STOP_TEXT, has_tool_calls=False) == "stop"


def test_probabilities_survive_half_characters_and_minus_infinity() -> None:
    entry = TokenLogprob(1, b"\xc3", -math.inf, [TopToken(2, "ö".encode(), -math.inf)])
    shown = msgspec.json.decode(to_json(token_probabilities([entry], probabilities=False)))
    assert shown == [
        {
            "id": 1,
            "token": "",
            "bytes": [0xC3],
            "logprob": LEAST_LOGPROB,
            "top_logprobs": [{"id": 2, "token": "ö", "bytes": [0xC3, 0xB6], "logprob": LEAST_LOGPROB}],
        }
    ]
    assert set(token_probabilities([entry], probabilities=True)[0]) == {"id", "token", "bytes", "prob", "top_probs"}
