"""`python -m tests.forced_calls [--calls N] [--first SEED]`: a GLM of random weights has to call tools, and every call
must fit its schema. Prints `N of N calls are valid`, and each that is not."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai

from tests.support.random_glm import write_random_glm
from tests.support.server_process import ServerProcess
from tests.support.tool_schemas import SchemaMaker

N_SLOTS = 4
FLAGS = ("--parallel", str(N_SLOTS), "--ctx-size", "32768", "--threads", "1")
# It has no idea of an end either, so what ends strings, lists and objects is made likelier.
CLOSERS = (('"', 6.0), ("}", 4.0), ("]", 4.0))


@dataclass
class Tally:
    n_valid: int = 0
    faults: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    n_tokens: int = 0


def request(seed: int) -> dict[str, Any]:
    """One request; what it asks for varies with the seed in many ways."""
    tools: list[Any] = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": SchemaMaker(seed * 10 + i).parameters()}}
        for i in range(1 + seed % 3)
    ]
    named = seed % 2 == 0
    choice: Any = {"type": "function", "function": {"name": tools[-1]["function"]["name"]}} if named else "required"
    thinks = {"thinking_budget_tokens": seed % 7} if seed % 5 else {"enable_thinking": False}
    return {
        "model": "random-glm",
        "messages": [{"role": "user", "content": f"Question {seed}?"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": seed % 4 < 2,
        "temperature": (0.0, 1.0, 1.5)[seed % 3],
        "seed": seed,
        "max_tokens": 6000,
        "extra_body": {"logit_bias": CLOSERS, "repeat_penalty": 1.0 + 0.1 * (seed % 2), **thinks},
    }


def fault_of(message: Any, finish_reason: str, asked: dict[str, Any]) -> str | None:
    """What is wrong with the calls of an answer; None: nothing."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in asked["tools"]}
    calls = message.tool_calls or []
    if finish_reason != "tool_calls" or not calls or message.content:
        return f"finish reason {finish_reason}, {len(calls)} calls, content {message.content!r}"
    named = asked["tool_choice"] != "required"
    if (named or not asked["parallel_tool_calls"]) and len(calls) > 1:
        return f"{len(calls)} calls instead of one"
    for call in calls:
        name = call.function.name
        if name not in schemas or (named and name != asked["tool_choice"]["function"]["name"]):
            return f"a call of {name}"
        validator = jsonschema_rs.validator_for(schemas[name], validate_formats=True)
        problem = next(iter(validator.iter_errors(json.loads(call.function.arguments))), None)
        if problem is not None:
            return f"{problem.message}: {call.function.arguments} for {json.dumps(schemas[name], ensure_ascii=False)}"
    return None


async def ask(client: openai.AsyncOpenAI, seed: int, tally: Tally) -> None:
    asked = request(seed)
    raw = await client.chat.completions.with_raw_response.create(**asked)
    answer = raw.parse()
    choice = answer.choices[0]
    warning = raw.headers.get("X-Constraint-Warning")
    fault = fault_of(choice.message, choice.finish_reason, asked) or (warning and f"left out: {warning}")
    if fault:
        tally.faults.append(f"seed {seed}: {fault}")
    else:
        tally.n_valid += 1
    tally.kinds["named" if asked["tool_choice"] != "required" else "required"] += 1
    tally.kinds["calls"] += len(choice.message.tool_calls or [])
    if answer.usage is not None:
        tally.n_tokens += answer.usage.completion_tokens


async def ask_all(url: str, seeds: range) -> Tally:
    tally = Tally()
    turn = asyncio.Semaphore(2 * N_SLOTS)

    async def one(client: openai.AsyncOpenAI, seed: int) -> None:
        async with turn:
            await ask(client, seed, tally)

    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client,
        asyncio.TaskGroup() as group,
    ):
        for seed in seeds:
            group.create_task(one(client, seed))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="requests to make")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_glm(Path(folder) / "random-glm.gguf")
        with ServerProcess("--gguf", str(model), *FLAGS) as server:
            seeds = range(arguments.first, arguments.first + arguments.calls)
            tally = asyncio.run(ask_all(server.url, seeds))
            server.stop()
    for fault in tally.faults:
        print(fault)
    print(f"{tally.n_valid} of {arguments.calls} answers are valid: {dict(tally.kinds)}, {tally.n_tokens} tokens")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if tally.n_valid == arguments.calls else 1


if __name__ == "__main__":
    sys.exit(main())
