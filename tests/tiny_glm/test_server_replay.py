"""Every dialogue through the real command and the openai SDK: exact reasoning, content, calls and finish reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from scripts.tiny_glm.corpus import Answer
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

N_SLOTS = 4


@asynccontextmanager
async def serving(shards: list[Path], *flags: str) -> AsyncIterator[openai.AsyncOpenAI]:
    # One thread: the model is too small for two, and a busy machine is no slower.
    common = ("--gguf", str(shards[0]), "--parallel", str(N_SLOTS), "--ctx-size", "8192", "--threads", "1")
    with ServerProcess(*common, *flags) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client
        assert server.stop() == 0, server.output


@dataclass
class Turn:
    """An answer as a client sees it."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, JSON text of the arguments
    finish_reason: str = ""


def promised(message: dict[str, Any]) -> Turn:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return Turn(
        message.get("reasoning_content", ""),
        message["content"] or "",
        [(function["name"], function["arguments"]) for function in functions],
        "tool_calls" if functions else "stop",
    )


def normalized(turn: Turn) -> Turn:
    """With the arguments in one spelling; the types in them stay apart (1, 1.0, true and "1" are four)."""
    turn.calls = [(name, json.dumps(json.loads(arguments), sort_keys=True)) for name, arguments in turn.calls]
    return turn


async def ask(client: openai.AsyncOpenAI, dialogue: dict[str, Any], index: int, *, stream: bool) -> Turn:
    """Have the message at `index` answered."""
    fields: dict[str, Any] = {
        "model": "tiny-glm",
        "messages": dialogue["messages"][:index],
        "temperature": 0,
        "extra_body": {"chat_template_kwargs": dialogue.get("template_kwargs", {})},
    }
    if "tools" in dialogue:
        fields["tools"] = dialogue["tools"]
    if stream:
        return await streamed(client, fields)
    [choice] = (await client.chat.completions.create(**fields)).choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return Turn(reasoning, message.content or "", calls, choice.finish_reason)


async def streamed(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Turn:
    turn = Turn()
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            turn.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            turn.content += choice.delta.content or ""
            turn.finish_reason = choice.finish_reason or turn.finish_reason
            for call in choice.delta.tool_calls or []:
                if call.index == len(turn.calls):
                    turn.calls.append((call.function.name, ""))
                name, arguments = turn.calls[call.index]
                turn.calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return turn


@pytest.mark.parametrize(
    ("cache", "flash_attention", "tool_grammar", "stream", "n_at_once"),
    [("f16", "off", "off", False, 1), ("f16", "on", "auto", True, N_SLOTS), ("q8_0", "on", "off", True, N_SLOTS)],
)
async def test_every_dialogue(
    shards: list[Path],
    dialogues: list[dict[str, Any]],
    cache: str,
    flash_attention: str,
    tool_grammar: str,
    stream: bool,
    n_at_once: int,
) -> None:
    wrong: dict[str, object] = {}
    turn = asyncio.Semaphore(n_at_once)

    async def hold(client: openai.AsyncOpenAI, dialogue: dict[str, Any]) -> None:
        async with turn:
            for index, message in enumerate(dialogue["messages"]):
                if message["role"] == "assistant":
                    got = normalized(await ask(client, dialogue, index, stream=stream))
                    if got != normalized(promised(message)):
                        wrong[f"{dialogue['id']} [{index}]"] = (promised(message), got)

    caches = ("--cache-type-k", cache, "--cache-type-v", cache)
    flags = (*caches, "--flash-attn", flash_attention, "--tool-grammar", tool_grammar)
    async with serving(shards, *flags) as client, asyncio.TaskGroup() as group:
        for dialogue in dialogues:
            # Mistakes in calls are mended by the parser; a grammar does not let them happen.
            if tool_grammar == "off" or dialogue.get("tool_grammar") != "off":
                group.create_task(hold(client, dialogue))
    assert wrong == {}, wrong


async def test_a_prompt_beyond_the_indexers_reach_is_answered(shards: list[Path], answers: list[Answer]) -> None:
    async with serving(shards, "--ctx-size", "16384") as client:
        story = " ".join(answer.text for answer in answers)[:5500]
        answer = await client.chat.completions.create(
            model="tiny-glm", messages=[{"role": "user", "content": story}], max_tokens=8, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 2048
        assert answer.usage.completion_tokens >= 1
