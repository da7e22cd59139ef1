"""What a request may ask of the answer's form, as far as it is settled before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.options import GenerationDefaults
from server.chat.glm_generation import Generation
from server.chat.glm_templates import fallback_template
from server.engine.client import JobStream
from server.engine.messages import Job, SamplingOptions
from tests.support.http import Served, served
from tests.support.scripted import ScriptedBackend

STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"not": {}}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def plain() -> ScriptedBackend:
    return ScriptedBackend(reply=lambda _: "yes", chat_template="{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": STRICT}, "Field 'response_format.json_schema': the keyword 'not' at # cannot be enforced"),
        ({"json_schema": {"properties": {"a": {"uniqueItems": True}}}}, "the keyword 'uniqueItems' at #/properties/a"),
        ({"guided_json": '{"pattern": "(?=a)"}'}, "Field 'guided_json': regex parse error: look-around"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "Field 'json_schema': Unsatisfiable schema"),
        ({"regex": "("}, "Field 'regex': "),
        ({"structured_outputs": {"regex": r"(a)\1"}}, "Field 'structured_outputs.regex': "),
        ({"grammar": "%llguidance {}\nstart: other"}, "Field 'grammar': "),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "is not supported together with"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_enforced_is_refused_before_any_answer(
    fields: dict[str, Any], words: str, stream: bool
) -> None:
    async with served(plain()) as s:
        response = await s.chat(**fields, stream=stream)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.json()["error"]["param"].partition(".")[0] == next(iter(fields))
        body = {"prompt": "hello", "stream": stream} | fields
        assert (await s.post("/v1/completions", body)).status_code == 400
        assert (await s.post("/completion", body)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_left_out_of_a_loose_schema_is_in_a_header(stream: bool) -> None:
    schema = {"properties": {"größe": {"type": "array", "uniqueItems": True}}}
    loose = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with served(plain()) as s:
        response = await s.chat(response_format=loose, stream=stream)
        assert response.status_code == 200
        said = response.headers["X-Constraint-Warning"]
        assert said == r"response_format.json_schema: uniqueItems at #/properties/gr\xf6\xdfe"
        assert "X-Constraint-Warning" not in (await s.chat(stream=stream)).headers


def watched(s: Served) -> list[Job]:
    """The jobs that will be opened."""
    jobs: list[Job] = []
    opened = s.engine.open

    def opening(job: Job) -> JobStream:
        jobs.append(job)
        return opened(job)

    s.engine.open = opening  # type: ignore[method-assign]
    return jobs


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema", "schema": {"type": "integer"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
        {"json_schema": {}},
        {"json_schema": True},
        {"guided_json": {"type": "string"}},
        {"guided_json": '{"type": "string"}'},
        {"regex": "yes|no"},
        {"guided_regex": "yes|no"},
        {"choice": ["yes", "no"]},
        {"guided_choice": ["yes", "no"]},
        {"grammar": '%llguidance {}\nstart: "yes"'},
        {"guided_grammar": 'root ::= "yes"'},
        {"structured_outputs": {"json": {"type": "string"}}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "yes"}},
        {"structured_outputs": {"choice": ["yes"]}},
        {"structured_outputs": {"grammar": 'root ::= "yes"'}},
    ],
)
async def test_forms_reach_the_engine(fields: dict[str, Any]) -> None:
    async with served(plain()) as s:
        jobs = watched(s)
        assert (await s.chat(**fields)).status_code == 200
        assert (await s.post("/v1/completions", {"prompt": "hello"} | fields)).status_code == 200
    assert all((job.constraint is None) is (job.sampling.grammar is not None) for job in jobs)
    assert len(jobs) == 2


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"grammar": ""}, {"guided_json": None}])
async def test_no_form(fields: dict[str, Any]) -> None:
    async with served(plain()) as s:
        jobs = watched(s)
        assert (await s.chat(**fields)).status_code == 200
    assert [(job.constraint, job.free_block, job.sampling.grammar) for job in jobs] == [(None, None, None)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_calls_cannot_be_forced_where_their_form_is_unknown(choice: Any) -> None:
    async with served(plain()) as s:
        response = await s.chat(tools=[TOOL], tool_choice=choice)
        assert response.status_code == 400
        assert "knows no form of tool calls for this model" in response.json()["error"]["message"]
        assert (await s.chat(tools=[TOOL])).status_code == 200


async def test_a_vocabulary_without_call_tags() -> None:
    """The scripted one has no tokens for them: what may be steered is not, and what must be is refused."""
    backend = ScriptedBackend(reply=lambda _: "</think>yes", chat_template=fallback_template(Generation.GLM_5_2))
    async with served(backend) as s:
        free = await s.chat(tools=[TOOL])
        assert free.status_code == 200
        assert "no tokens for their tags" in free.headers["X-Constraint-Warning"]
        assert (await s.chat(tools=[TOOL], tool_choice="required")).status_code == 400


async def test_the_servers_own_grammar_gives_way_to_a_form() -> None:
    sampling = SamplingOptions(grammar='root ::= "no"')
    async with served(plain(), generation=GenerationDefaults(sampling=sampling)) as s:
        jobs = watched(s)
        assert (await s.chat(regex="yes")).status_code == 200
        assert (await s.chat()).status_code == 200
    assert [(job.constraint is None, job.sampling.grammar) for job in jobs] == [(False, None), (True, 'root ::= "no"')]


async def test_a_choice_that_is_a_tag_of_the_model() -> None:
    backend = ScriptedBackend(reply=lambda _: "</think>yes", chat_template=fallback_template(Generation.GLM_5_2))
    async with served(backend) as s:
        response = await s.chat(choice=["yes", "</think>"])
        assert response.status_code == 400
        assert "'</think>' has a tag of the model's own" in response.json()["error"]["message"]
