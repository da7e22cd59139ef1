"""The official client against a real socket: sync and async, streamed and not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from server.chat.glm_generation import Generation
from server.chat.glm_templates import fallback_template
from tests.support.http import Served, keys_of, listening, served
from tests.support.scripted import ScriptedBackend


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
async def live() -> AsyncIterator[tuple[Served, str]]:
    backend = ScriptedBackend(reply=lambda p: f"<{p}>" if p != "endless" else "x" * 100_000)
    async with served(backend, api_keys=keys_of("k"), ping_interval_s=0.001) as s, listening(s.app) as (base, _):
        yield s, f"{base}/v1"


async def test_async_client(live: tuple[Served, str]) -> None:
    _, base = live
    async with openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=1, n=2, seed=1
        )
        assert [choice.message.content for choice in whole.choices] == ["<hello>", "<hello>"]
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        assert whole.choices[0].logprobs.content[0].token == "<"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.total_tokens == 21

        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "<hello>"
        assert chunks[-1].usage is not None

        text = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, echo=False)
        assert [choice.text for choice in text.choices] == ["<a>", "<b>"]
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens == ["<", "a", ">"]


async def test_errors_become_the_clients_exceptions(live: tuple[Served, str]) -> None:
    _, base = live
    async with openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0) as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="use one of: 'tiny'"):
            await create(model="gpt", messages=user("hello"))
        with pytest.raises(openai.BadRequestError, match="Field 'temperature'") as caught:
            await create(model="tiny", messages=user("hello"), temperature="x")
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", "temperature")
        with pytest.raises(openai.BadRequestError, match="the prompt has 5000 tokens"):
            await create(model="tiny", messages=user("x" * 5000), stream=True)
    async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_sync_client(live: tuple[Served, str]) -> None:
    _, base = live

    def work() -> str:
        with openai.OpenAI(base_url=base, api_key="k", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(work) == "<hello>"


async def test_closing_a_stream_cancels_it_and_an_error_in_it_is_raised(live: tuple[Served, str]) -> None:
    s, base = live
    async with openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0) as client:
        create: Any = client.chat.completions.create
        stream = await create(model="tiny", messages=user("endless"), stream=True)
        await anext(aiter(stream))
        await stream.close()
        (record,) = await s.metrics.finished(1)
        assert record.disconnected

        chunks = aiter(await create(model="tiny", messages=user("endless"), stream=True))
        await anext(chunks)
        s.engine.fail_all("it was killed")
        with pytest.raises(openai.APIError, match="it was killed"):
            async for _ in chunks:
                pass


async def test_a_tool_loop_with_the_streaming_helper() -> None:
    """The helper joins the deltas itself, and is strict about their shape."""
    call = "<tool_call>weather<arg_key>城市</arg_key><arg_value>{}</arg_value></tool_call>"
    replies = [f"Two.</think>I look.{call.format('上海')}{call.format('北京')}", "Hm.</think>Rain in both."]
    backend = ScriptedBackend(
        reply=lambda prompt: replies["<tool_response>" in prompt], chat_template=fallback_template(Generation.GLM_5_2)
    )
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}  # the helper takes no others
    tools: Any = [{"type": "function", "function": function}]
    messages: Any = user("How is the weather?")
    async with (
        served(backend) as s,
        listening(s.app) as (base, _),
        openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        async with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
            first = (await stream.get_final_completion()).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content == "I look."
        calls = first.message.tool_calls or []
        assert [call.function.arguments for call in calls] == ['{"城市": "上海"}', '{"城市": "北京"}']
        messages.append(first.message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        second = (await client.chat.completions.create(model="tiny", messages=messages, tools=tools)).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "Rain in both.")
    assert second.message.model_extra == {"reasoning_content": "Hm.", "reasoning": "Hm."}
