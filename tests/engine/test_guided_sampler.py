"""Constraints in llama.cpp's sampling: a model of random weights writes what it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.engine.backend import DecodeStatus, Logits, Piece, Sampler
from server.engine.engine import Engine
from server.engine.llama import LlamaBackend
from server.engine.messages import (
    BlockLimit,
    Constraint,
    Failed,
    FailureKind,
    FinishReason,
    FreeBlock,
    Job,
    SamplingOptions,
    Span,
)
from server.engine.options import EngineOptions, ModelOptions, SchedulerOptions
from server.errors import InvalidRequest
from tests.support.driving import Log, run_to_end
from tests.support.tiny_gguf import write_tiny_gguf

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["hot", "word"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
JSON = Constraint(f"start: %json {json.dumps(POINT)}")
WORD = Constraint('start: "the" | "this"')
GREEDY = SamplingOptions(temperature=0.0)
WILD = SamplingOptions(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    options = ModelOptions(str(path), n_ctx=4096, n_slots=2, flash_attn="off", n_threads=1)
    backend = LlamaBackend.load(EngineOptions(options), lambda phase, progress: None)
    yield backend
    backend.close()


def token(backend: LlamaBackend, text: str) -> int:
    (found,) = backend.tokenize([Span(text, special=True)], add_special=False)
    return found


def job(backend: LlamaBackend, sampling: SamplingOptions, job_id: int = 1, **fields: Any) -> Job:
    tokens = backend.tokenize([Span("this is the word", special=False)], add_special=True)
    return Job(job_id, tokens, sampling, fields.pop("max_tokens", 400), show_special=True, **fields)


def answers(backend: LlamaBackend, *jobs: Job) -> Log:
    for sequence in range(2):
        backend.keep(sequence, 0)
    engine = Engine(backend, SchedulerOptions())
    for each in jobs:
        engine.submit(each)
    return run_to_end(engine, Log())


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        WILD,
        SamplingOptions(seed=1),
        SamplingOptions(seed=1, repeat_penalty=1.5, dry_multiplier=0.8),
        SamplingOptions(seed=1, mirostat=2),
        SamplingOptions(seed=1, mirostat=1),
        SamplingOptions(seed=1, samplers=("top_k", "adaptive_p"), adaptive_target=0.5),
        SamplingOptions(temperature=0.0, repeat_penalty=1.5),
        SamplingOptions(seed=1, logit_bias=((20, 1.0),)),
        SamplingOptions(temperature=0.0, logit_bias=((20, 1.0),)),
    ],
)
def test_json_is_written_whatever_the_chain(backend: LlamaBackend, sampling: SamplingOptions) -> None:
    log = answers(backend, job(backend, sampling, constraint=JSON))
    assert log.finished(1).reason is FinishReason.END_OF_TURN
    point = json.loads(log.text(1))
    assert 0 <= point["x"] <= 99
    assert point["name"] in ("hot", "word")


@pytest.mark.parametrize("sampling", [WILD, SamplingOptions(seed=4, repeat_penalty=1.3)])
def test_the_same_seed_gives_the_same_answer(backend: LlamaBackend, sampling: SamplingOptions) -> None:
    alone = [answers(backend, job(backend, sampling, constraint=JSON)).text(1) for _ in range(2)]
    beside = answers(backend, job(backend, sampling, constraint=JSON), job(backend, WILD, 2, constraint=WORD))
    assert len({*alone, beside.text(1)}) == 1
    assert beside.text(2) in ("the", "this")


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingOptions(seed=3), SamplingOptions(seed=3, repeat_penalty=1.3), SamplingOptions(seed=3, mirostat=2)],
)
def test_a_constraint_that_refuses_nothing_changes_nothing(backend: LlamaBackend, sampling: SamplingOptions) -> None:
    anything = Constraint("start: <[*]>*")
    free = answers(backend, job(backend, sampling, max_tokens=40)).text(1)
    assert answers(backend, job(backend, sampling, max_tokens=40, constraint=anything)).text(1) == free


def test_a_cut_answer_is_a_matter_of_length(backend: LlamaBackend) -> None:
    log = answers(backend, job(backend, WILD, constraint=JSON, max_tokens=3))
    assert log.finished(1).reason is FinishReason.LENGTH
    assert log.text(1).startswith("{")


@pytest.mark.parametrize("post_sampling_probs", [False, True])
def test_probabilities_under_a_constraint(backend: LlamaBackend, post_sampling_probs: bool) -> None:
    """Before sampling they are the model's own; after it only what the constraint allows is left."""
    sampler = backend.sampler(
        job(backend, SamplingOptions(seed=1), constraint=WORD, n_logprobs=5, post_sampling_probs=post_sampling_probs)
    )
    row, chosen = first_token(backend, sampler)
    entry = sampler.logprobs(row, chosen, 5)
    sampler.close()
    assert entry.token == chosen
    if post_sampling_probs:
        assert {each.piece for each in entry.top} <= {b"t", b"th", b"thi", b"this", b"the"}
        assert sum(each.logprob for each in entry.top) == pytest.approx(1.0)
    else:
        assert entry.logprob < 0


def first_token(backend: LlamaBackend, sampler: Sampler) -> tuple[int, int]:
    """The row it was sampled from, and the token."""
    backend.keep(0, 0)
    tokens = job(backend, GREEDY).tokens
    assert backend.decode([Piece(0, 0, tokens, Logits.LAST)]) is DecodeStatus.OK
    row = len(tokens) - 1
    return row, sampler.sample(row)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_options_that_ban_all_that_is_allowed_fail_the_job(backend: LlamaBackend, temperature: float) -> None:
    bans = tuple((backend.tokenize([Span("t", special=False)], add_special=False)[0], float("-inf")) for _ in range(1))
    only_t = Constraint("start: /t+x/")
    options = SamplingOptions(seed=1, temperature=temperature, logit_bias=bans)
    log = answers(backend, job(backend, options, constraint=only_t))
    end = log.end(1)
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.INVALID
    assert "allows no token" in end.message


def test_a_wrong_constraint_fails_its_job_only(backend: LlamaBackend) -> None:
    log = answers(
        backend, job(backend, GREEDY, constraint=Constraint("start: /(/")), job(backend, GREEDY, 2, constraint=WORD)
    )
    end = log.end(1)
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.INVALID
    assert log.text(2) in ("the", "this")
    with pytest.raises(InvalidRequest, match="invalid regex"):
        backend.prepare(Constraint("start: /(/"))


# ── reasoning ahead of it ────────────────────────────────────────────────────────────────────────────────────────────

# Any two control tokens will do for the tags of reasoning.
OPENER, CLOSER = "<|user|>", "<|assistant|>"


def block(backend: LlamaBackend) -> FreeBlock:
    return FreeBlock(token(backend, OPENER), token(backend, CLOSER), is_open=True)


@pytest.mark.parametrize("grammar", [None, 'root ::= "the" | "this"'])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(seed=2), SamplingOptions(seed=2, repeat_penalty=1.3)])
def test_a_budget_closes_the_reasoning_and_then_the_form_begins(
    backend: LlamaBackend, sampling: SamplingOptions, grammar: str | None
) -> None:
    closer = token(backend, CLOSER)
    ending = [*backend.tokenize([Span("word", special=False)], add_special=False), closer]
    limit = BlockLimit(5, token(backend, OPENER), closer, ending, is_open=True)
    options = SamplingOptions(
        seed=sampling.seed, temperature=sampling.temperature, repeat_penalty=sampling.repeat_penalty, grammar=grammar
    )
    constraint = None if grammar else WORD
    asked = job(backend, options, block_limit=limit, free_block=block(backend), constraint=constraint)
    log = answers(backend, asked)
    reasoning, _, answer = log.text(1).partition(CLOSER)
    assert reasoning.endswith("word")
    assert answer in ("the", "this")
    assert log.finished(1).reason is FinishReason.END_OF_TURN


@pytest.mark.parametrize("grammar", [None, 'root ::= "the" | "this"'])
def test_an_end_inside_the_reasoning_closes_it(backend: LlamaBackend, grammar: str | None) -> None:
    ends = tuple((end, 50.0) for end in backend.end_tokens)
    asked = job(
        backend,
        SamplingOptions(seed=2, logit_bias=ends, grammar=grammar),
        free_block=block(backend),
        constraint=None if grammar else WORD,
    )
    assert answers(backend, asked).text(1) in (f"{CLOSER}the", f"{CLOSER}this")
