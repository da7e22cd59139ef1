from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.backend import DecodeStatus, Logits, Piece
from server.engine.llama import LlamaBackend
from server.engine.messages import Job, SamplingOptions, Span, TokenLogprob
from server.engine.options import EngineOptions, ModelOptions
from server.engine.sampling import _largest
from server.errors import InvalidRequest
from tests.support.tiny_gguf import EOS_TEXT, write_tiny_gguf

# What llama.cpp's C++ server of the same source (b1-0c1e570, -np 1 -fa off -c 4096 -t 2) answered to POST /completion
# with the model of write_tiny_gguf(): field values of the request, and the token ids it returned.
CPP_SERVER_ANSWERS = json.loads(Path(__file__).with_name("cpp_server_answers.json").read_text())


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    options = ModelOptions(str(path), n_ctx=4096, n_slots=1, flash_attn="off", n_threads=1)
    backend = LlamaBackend.load(EngineOptions(options), lambda phase, progress: None)
    yield backend
    backend.close()


def generate(backend: LlamaBackend, job: Job, n_tokens: int) -> tuple[list[int], list[TokenLogprob]]:
    """A bare decode loop in a cleared sequence."""
    backend.keep(0, 0)
    sampler = backend.sampler(job)
    piece = Piece(0, 0, job.tokens, Logits.LAST)
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    try:
        while True:
            assert backend.decode([piece]) is DecodeStatus.OK
            row = len(piece.tokens) - 1
            tokens.append(sampler.sample(row))
            if job.n_logprobs is not None:
                logprobs.append(sampler.logprobs(row, tokens[-1], job.n_logprobs))
            if len(tokens) == n_tokens or backend.is_end(tokens[-1]):
                return tokens, logprobs
            piece = Piece(0, piece.start + len(piece.tokens), tokens[-1:], Logits.LAST)
    finally:
        sampler.close()


def prompt(backend: LlamaBackend, text: str = "this is the word of the word") -> list[int]:
    return backend.tokenize([Span(text, special=True)], add_special=True)


def eos(backend: LlamaBackend) -> int:
    (token,) = backend.tokenize([Span(EOS_TEXT, special=True)], add_special=False)
    return token


@pytest.mark.parametrize("post_sampling", [False, True])
def test_a_forced_token_counts_for_penalties_and_probabilities(backend: LlamaBackend, post_sampling: bool) -> None:
    tokens = prompt(backend)
    options = SamplingOptions(temperature=0.0, presence_penalty=1000.0)
    (unpenalised,), _ = generate(backend, Job(0, tokens, SamplingOptions(temperature=0.0)), 1)
    sampler = backend.sampler(Job(0, tokens[:1], options, n_logprobs=2, post_sampling_probs=post_sampling))
    assert backend.keep(0, 0)
    assert backend.decode([Piece(0, 0, tokens, Logits.LAST)]) is DecodeStatus.OK
    row = len(tokens) - 1
    sampler.force(row, unpenalised)
    assert sampler.logprobs(row, unpenalised, 2).token == unpenalised
    assert sampler.sample(row) != unpenalised
    sampler.close()


def test_a_token_can_be_forced_where_sampling_has_no_chain(backend: LlamaBackend) -> None:
    tokens = prompt(backend)
    sampler = backend.sampler(Job(0, tokens, SamplingOptions(temperature=0.0)))
    sampler.force(0, tokens[0])
    sampler.close()


# ── the same tokens as llama.cpp's server ────────────────────────────────────────────────────────────────────────────


def options_of(request: dict[str, Any]) -> SamplingOptions:
    fields = {name: value for name, value in request.items() if name in SamplingOptions.__struct_fields__}
    if "samplers" in fields:
        fields["samplers"] = tuple(fields["samplers"])
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple((token, bias) for token, bias in fields["logit_bias"])
    return SamplingOptions(**fields)


@pytest.mark.parametrize("answer", CPP_SERVER_ANSWERS, ids=lambda answer: answer["name"])
def test_tokens_equal_those_of_the_cpp_server(backend: LlamaBackend, answer: dict[str, Any]) -> None:
    request = answer["request"]
    job = Job(
        0,
        prompt(backend, answer["prompt"]),
        options_of(request),
        n_logprobs=request.get("n_probs"),
        post_sampling_probs=request.get("post_sampling_probs", False),
    )
    tokens, logprobs = generate(backend, job, answer["n_predict"])
    assert tokens == answer["tokens"]
    assert backend.is_end(tokens[-1]) == (answer["stop_type"] == "eos")
    for ours, (chosen, top) in zip(logprobs, answer.get("probabilities", []), strict=True):
        assert ours.logprob == pytest.approx(chosen, abs=1e-4)
        assert [entry.token for entry in ours.top] == [token for token, _ in top]
        assert [entry.logprob for entry in ours.top] == pytest.approx([value for _, value in top], abs=1e-4)


def test_a_random_seed_differs_from_run_to_run(backend: LlamaBackend) -> None:
    job = Job(0, prompt(backend), SamplingOptions(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0))
    runs = {tuple(generate(backend, job, 16)[0]) for _ in range(3)}
    assert len(runs) > 1


def test_penalties_look_back_at_the_prompt(backend: LlamaBackend) -> None:
    """A window of the whole context (-1) reaches a prompt token that the default window has forgotten."""
    favourite = generate(backend, Job(0, prompt(backend), SamplingOptions(temperature=0.0)), 1)[0][0]
    tokens = [prompt(backend)[0], favourite, *[prompt(backend)[1]] * 100]
    backend.keep(0, 0)
    assert backend.decode([Piece(0, 0, tokens, Logits.LAST)]) is DecodeStatus.OK
    choices = {}
    for last_n in (0, 64, -1):
        # the bias makes the favourite win unless it is penalised
        options = SamplingOptions(
            temperature=0.0, repeat_last_n=last_n, presence_penalty=100.0, logit_bias=((favourite, 50.0),)
        )
        sampler = backend.sampler(Job(0, tokens, options))
        choices[last_n] = sampler.sample(len(tokens) - 1)
        sampler.close()
    assert choices[0] == choices[64] == favourite
    assert choices[-1] != favourite


# ── probabilities ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_logprobs_of_all_tokens_are_a_distribution(backend: LlamaBackend) -> None:
    n_vocab = backend.facts.n_vocab
    _, (logprob,) = generate(backend, Job(0, prompt(backend), SamplingOptions(seed=1), n_logprobs=n_vocab), 1)
    values = [entry.logprob for entry in logprob.top]
    assert sum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-5)
    assert values == sorted(values, reverse=True)
    assert sorted(entry.token for entry in logprob.top) == list(range(n_vocab))
    assert logprob.logprob == next(entry.logprob for entry in logprob.top if entry.token == logprob.token)
    assert logprob.piece == backend.piece(logprob.token, show_special=False)


def test_no_top_tokens_where_none_are_asked(backend: LlamaBackend) -> None:
    _, (logprob,) = generate(backend, Job(0, prompt(backend), SamplingOptions(temperature=0.0), n_logprobs=0), 1)
    assert logprob.top == []
    assert -20.0 < logprob.logprob < 0.0


def test_post_sampling_probabilities_of_a_greedy_choice(backend: LlamaBackend) -> None:
    job = Job(0, prompt(backend), SamplingOptions(temperature=0.0), n_logprobs=5, post_sampling_probs=True)
    (token,), (probability,) = generate(backend, job, 1)
    assert probability.logprob == 1.0
    assert [(entry.token, entry.logprob) for entry in probability.top] == [(token, 1.0)]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=2000), st.integers(1, 40))
def test_largest_is_the_head_of_a_full_sort(values: list[float], n: int) -> None:
    array = np.array(values, dtype=np.float32)
    assert array[_largest(array, n)].tolist() == sorted(array.tolist(), reverse=True)[:n]


# ── what the options forbid ──────────────────────────────────────────────────────────────────────────────────────────


def test_minus_infinity_bans_a_token(backend: LlamaBackend) -> None:
    first = generate(backend, Job(0, prompt(backend), SamplingOptions(temperature=0.0)), 1)[0][0]
    banned = SamplingOptions(temperature=0.0, logit_bias=((first, -math.inf),))
    assert generate(backend, Job(0, prompt(backend), banned), 1)[0][0] != first


@pytest.mark.parametrize(
    "change", [(-math.inf, 0.0), (0.0, 100.0), (-100.0, 0.5), (0.0, -3.0), (-3.0, -3.0), (2.0, 2.0)]
)
def test_a_greedy_choice_under_biases_is_that_of_the_chain(backend: LlamaBackend, change: tuple[float, float]) -> None:
    """Greedy goes without the chain, whatever the biases do to the likeliest token and to another one."""
    tokens = prompt(backend)
    first = generate(backend, Job(0, tokens, SamplingOptions(temperature=0.0)), 1)[0][0]
    other = (first + 7) % backend.facts.n_vocab
    for others in (change, change[::-1]):
        biases = ((first, others[0]), (other, others[1]))
        greedy = SamplingOptions(temperature=0.0, logit_bias=biases, ignore_eos=True)
        chain = SamplingOptions(temperature=1.0, top_k=1, logit_bias=biases, ignore_eos=True)
        expected = generate(backend, Job(0, tokens, chain), 8)[0]
        assert generate(backend, Job(0, tokens, greedy), 8)[0] == expected


def test_ignore_eos_bans_every_end_token(backend: LlamaBackend) -> None:
    options = SamplingOptions(seed=3, logit_bias=((eos(backend), 100.0),))
    assert generate(backend, Job(0, prompt(backend), options), 8)[0] == [eos(backend)]
    options = SamplingOptions(seed=3, logit_bias=((eos(backend), 100.0),), ignore_eos=True)
    assert eos(backend) not in generate(backend, Job(0, prompt(backend), options), 8)[0]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        (SamplingOptions(repeat_penalty=0.0), "repeat_penalty", "greater than 0"),
        (SamplingOptions(presence_penalty=math.nan), "presence_penalty", "finite"),
        (SamplingOptions(mirostat=3), "mirostat", "0, 1 or 2"),
        (SamplingOptions(logit_bias=((100_000, 1.0),)), "logit_bias", "100000"),
        (SamplingOptions(samplers=("top_k", "magic")), "samplers", "'magic'"),
        (SamplingOptions(grammar="root ::= ["), "grammar", "unexpected end of input"),
        (SamplingOptions(grammar='root ::= "a" missing'), "grammar", "Undefined rule identifier 'missing'"),
        (SamplingOptions(grammar='start ::= "a"'), "grammar", "'root'"),
        (SamplingOptions(grammar='root ::= root "a"'), "grammar", "left recursion"),
        (SamplingOptions(grammar="%llguidance {}"), "grammar", "GBNF"),
        (SamplingOptions(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), "grammar", "nests 50,000"),
        (SamplingOptions(grammar="root ::= " + '"a" | ' * 50_000 + '"b"'), "grammar", "bytes"),
    ],
)
def test_options_that_cannot_be_used_name_the_field(
    backend: LlamaBackend, options: SamplingOptions, param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        backend.sampler(Job(0, prompt(backend), options))
    assert caught.value.param == param
    assert words in caught.value.message


def test_parentheses_in_strings_are_not_nesting(backend: LlamaBackend) -> None:
    backend.sampler(Job(0, prompt(backend), SamplingOptions(grammar='root ::= "' + "(" * 2000 + '"'))).close()


def test_a_prompt_token_outside_the_vocabulary_is_refused(backend: LlamaBackend) -> None:
    for wrong in (-1, backend.facts.n_vocab):
        with pytest.raises(InvalidRequest, match=str(wrong)):
            backend.sampler(Job(0, [1, wrong]))


# ── grammar ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 0.8, 3.0])
def test_a_grammar_is_obeyed_to_its_end(backend: LlamaBackend, temperature: float) -> None:
    options = SamplingOptions(temperature=temperature, seed=5, grammar='root ::= "yes" | "no"')
    tokens, _ = generate(backend, Job(0, prompt(backend), options), 32)
    assert backend.is_end(tokens[-1])
    assert backend.detokenize(tokens, show_special=False) in {"yes", "no"}


def test_a_grammar_without_a_way_on_fails_the_job_only(backend: LlamaBackend) -> None:
    """Accepting a token that the grammar forbids would abort the process."""
    options = SamplingOptions(temperature=0.0, grammar='root ::= "a"', ignore_eos=True)
    with pytest.raises(InvalidRequest, match="allows no token"):
        generate(backend, Job(0, prompt(backend), options), 32)
    assert generate(backend, Job(0, prompt(backend), SamplingOptions(temperature=0.0)), 4)[0]


def test_a_refused_grammar_is_not_printed(backend: LlamaBackend, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest):
        backend.sampler(Job(0, prompt(backend), SamplingOptions(grammar="root ::= secret")))
    assert "secret" not in "".join(capfd.readouterr())


# ── rows, life ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [SamplingOptions(temperature=0.0), SamplingOptions(seed=1)])
def test_a_row_without_logits_is_an_error_not_an_abort(backend: LlamaBackend, options: SamplingOptions) -> None:
    tokens = prompt(backend)
    backend.keep(0, 0)
    sampler = backend.sampler(Job(0, tokens, options))
    assert backend.decode([Piece(0, 0, tokens, Logits.LAST)]) is DecodeStatus.OK
    with pytest.raises(IndexError, match="no logits"):
        sampler.sample(0)
    sampler.close()


def test_samplers_close_twice(backend: LlamaBackend) -> None:
    for options in (SamplingOptions(temperature=0.0), SamplingOptions(seed=1, grammar='root ::= "a"')):
        sampler = backend.sampler(Job(0, prompt(backend), options))
        sampler.close()
        sampler.close()
