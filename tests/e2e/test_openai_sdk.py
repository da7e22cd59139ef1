"""The official client against the real command: what most users do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

ASK: Any = [{"role": "user", "content": "say something"}]


@pytest.fixture
def client(tiny_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(tiny_server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_streamed_and_not_is_the_same(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert chunks[-1].choices == []
    assert whole.model == "tiny"
    assert whole.system_fingerprint.startswith("b")


def test_timings_add_up(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=10, seed=1)
    assert answer.usage is not None
    timings = json.loads(answer.model_dump_json())["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens
    assert timings["predicted_n"] == answer.usage.completion_tokens
    expected = 1e3 / timings["predicted_ms"] * (timings["predicted_n"] - 1)
    assert timings["predicted_per_second"] == pytest.approx(expected, rel=1e-6)


async def test_sixteen_clients_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def ask(i: int) -> str:
        stream = await async_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"client {i} says hello"}],
            max_tokens=32,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    alone = [await ask(i) for i in range(4)]
    together = await asyncio.gather(*(ask(i) for i in range(16)))
    assert together[:4] == alone
    assert all(together)


def test_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, n=3, max_tokens=12, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    greedy = client.chat.completions.create(model="tiny", messages=ASK, n=2, max_tokens=12, temperature=0)
    assert greedy.choices[0].message.content == greedy.choices[1].message.content


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=24, seed=seed, temperature=1.5)
        return answer.choices[0].message.content

    assert ask(42) == ask(42)
    assert ask(42) != ask(43)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.logprob <= 0


def test_text_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the of and", max_tokens=8, temperature=0)
    streamed = client.completions.create(model="tiny", prompt="the of and", max_tokens=8, temperature=0, stream=True)
    assert answer.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed)
    both = client.completions.create(model="tiny", prompt=["the of and", "is you"], max_tokens=8, temperature=0)
    assert both.choices[0].text == answer.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_faults_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'nope' is not served here; use one of: 'tiny'"):
        client.chat.completions.create(model="nope", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=ASK, extra_body={"temperature": "hot"})
    long: Any = [{"role": "user", "content": "hello " * 2000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="tokens, but one request may use 1024 tokens") as caught:
            client.chat.completions.create(model="tiny", messages=long, stream=stream)
        body: Any = caught.value.body
        assert body["n_ctx"] == 1024


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 30}
    text = client.chat.completions.create(**fields).choices[0].message.content
    stop = text[8:11]
    cut = client.chat.completions.create(**fields, stop=[stop]).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
