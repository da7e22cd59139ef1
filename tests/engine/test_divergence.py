from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.divergence import find_divergence
from server.engine.messages import Divergence, Started
from tests.support.driving import Log, engine_of, job, run_to_end
from tests.support.scripted import ScriptedBackend


def text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("latin-1")


def between(prompt: str, cached: str) -> Divergence | None:
    return find_divergence(list(prompt.encode()), list(cached.encode()), text_of)


REST = " You are an agent. Be brief."


def test_a_clock_is_found() -> None:
    found = between("The time is 12:31:07." + REST, "The time is 12:30:55." + REST)
    assert found == Divergence(16, "time is 12:3", "1:07. You are an", "0:55. You are an", rejoins_after=4)


def test_texts_that_stay_different_do_not_rejoin() -> None:
    found = between("Hello, this is one thing and that is all of it", "Hello, there was another one, of which no more")
    assert found is not None
    assert (found.at, found.rejoins_after) == (9, None)


def test_a_value_of_another_length_is_found_as_well() -> None:
    found = between("n=7;" + REST, "n=123456;" + REST)
    assert found is not None
    assert (found.at, found.rejoins_after) == (2, 1)


@pytest.mark.parametrize(("prompt", "cached"), [("abc", "abc"), ("abcdef", "abc"), ("abc", "abcdef"), ("abc", "")])
def test_what_just_goes_on_does_not_diverge(prompt: str, cached: str) -> None:
    assert between(prompt, cached) is None


@given(st.text(alphabet="ab", max_size=120), st.text(alphabet="ab", max_size=120))
def test_the_place_is_the_first_difference(prompt: str, cached: str) -> None:
    found = between(prompt, cached)
    if found is None:
        assert prompt.startswith(cached) or cached.startswith(prompt) or prompt[0] != cached[0]
        return
    assert prompt[: found.at] == cached[: found.at]
    assert prompt[found.at] != cached[found.at]
    assert prompt[: found.at].endswith(found.before)
    assert prompt[found.at :].startswith(found.prompt)
    assert cached[found.at :].startswith(found.cached)


def starts(log: Log) -> dict[int, Started]:
    return {event.job_id: event for event in log.events if isinstance(event, Started)}


@pytest.mark.parametrize("asks", [True, False])
def test_the_engine_tells_who_asks(asks: bool) -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "ok"))
    log = Log()
    for job_id, prompt in enumerate(("other text", "It is 12:30:55." + REST, "It is 12:31:07." + REST)):
        engine.submit(job(job_id, prompt, explain_cache=asks))
        run_to_end(engine, log)
    found = starts(log)
    assert found[0].divergence is None
    assert found[1].divergence is None
    if not asks:
        assert found[2].divergence is None
        return
    assert found[2].divergence is not None
    assert (found[2].divergence.at, found[2].n_cached) == (10, 10)
    assert found[2].divergence.cached.startswith("0:55.")


def test_a_prompt_that_is_being_read_counts_too() -> None:
    engine = engine_of(ScriptedBackend(reply=lambda _: "ok", n_batch=16))
    engine.submit(job(1, "It is 12:30:55." + REST * 3))
    log = Log(engine.step())
    engine.submit(job(2, "It is 12:31:07." + REST * 3, explain_cache=True))
    divergence = starts(run_to_end(engine, log))[2].divergence
    assert divergence is not None
    assert divergence.at == 10
