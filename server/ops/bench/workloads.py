"""The named loads. Each sends the same words to every server in the same round, and other words in the next round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from server.ops.bench.client import ChatMessage, Client
from server.ops.bench.measures import Answer, Run

_WORDS = """
anchor apple autumn basket beacon branch bread button candle canyon carpet cellar cherry circle copper corner
cotton desert dinner dragon echo evening feather field finger flower frost gravel guitar hammer hollow island
jacket journey kettle ladder lantern lemon marble meadow mirror mountain needle ocean orchard oven pebble pepper
pillow planet pocket puzzle rabbit ribbon saddle season shadow shovel spring summer thunder ticket timber tunnel
valley velvet village violin walnut wheel willow window wonder yard
""".split()


@dataclass(frozen=True, slots=True)
class Workload:
    """`run` sends it once. `about` is a line for --list."""

    name: str
    about: str
    run: Callable[[Client, Random], Awaitable[Run]]


def words(rng: Random, count: int) -> str:
    """Sentences of common words, about one and a quarter tokens a word."""
    chosen = [rng.choice(_WORDS) for _ in range(count)]
    return " ".join(word + "." if number % 11 == 10 else word for number, word in enumerate(chosen))


def _says(role: str, text: str) -> ChatMessage:
    return {"role": role, "content": text}


async def _at_once(client: Client, prompts: Sequence[Sequence[ChatMessage]], n_tokens: int, n_at_once: int) -> Run:
    """Keep `n_at_once` requests running until all prompts are answered."""
    free = asyncio.Semaphore(n_at_once)

    async def one(prompt: Sequence[ChatMessage]) -> Answer:
        async with free:
            return await client.ask(prompt, n_tokens)

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return Run(tuple(task.result() for task in tasks), time.perf_counter() - start_s)


async def _decode(n_at_once: int, client: Client, rng: Random) -> Run:
    prompts = [[_says("user", words(rng, 40))] for _ in range(max(3, 2 * n_at_once))]
    return await _at_once(client, prompts, 96, n_at_once)


async def _prefill(client: Client, rng: Random) -> Run:
    return await _at_once(client, [[_says("user", words(rng, 900))] for _ in range(3)], 4, 1)


async def _prefix(client: Client, rng: Random) -> Run:
    shared = _says("system", words(rng, 1000))
    return await _at_once(client, [[shared, _says("user", words(rng, 10))] for _ in range(8)], 24, 8)


async def _sessions(client: Client, rng: Random) -> Run:
    histories = [[_says("system", words(rng, 220))] for _ in range(10)]
    runs: list[Run] = []
    for _turn in range(3):
        for history in histories:
            history.append(_says("user", words(rng, 20)))
        run = await _at_once(client, histories, 16, 4)
        for history, answer in zip(histories, run.answers, strict=True):
            history.append(_says("assistant", answer.text))
        runs.append(run)
    return Run(tuple(answer for run in runs for answer in run.answers), sum(run.wall_s for run in runs))


async def _mix(client: Client, rng: Random) -> Run:
    n_streams, n_first = 3, 8
    flowing = asyncio.Semaphore(0)  # released by each stream once its answer is well under way

    def seen(n_deltas: int) -> None:
        if n_deltas == n_first:
            flowing.release()

    async def stream(prompt: str) -> Answer:
        answer = await client.ask([_says("user", prompt)], 192, seen)
        flowing.release()  # for servers that send a whole answer in fewer pieces
        return answer

    async def long_prompt(prompt: str) -> Answer:
        for _ in range(n_streams):
            await flowing.acquire()
        return await client.ask([_says("user", prompt)], 4)

    short = [words(rng, 20) for _ in range(n_streams)]
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        late = group.create_task(long_prompt(words(rng, 2000)))
        streams = [group.create_task(stream(prompt)) for prompt in short]
    return Run(tuple(task.result() for task in streams), time.perf_counter() - start_s, late.result())


WORKLOADS = (
    Workload("decode1", "one stream of 96 tokens after another", partial(_decode, 1)),
    Workload("decode4", "four streams at once", partial(_decode, 4)),
    Workload("decode8", "eight streams at once", partial(_decode, 8)),
    Workload("prefill", "prompts of 900 words, four tokens each, one after another", _prefill),
    Workload("prefix", "eight questions at once about the same 1,000 words", _prefix),
    Workload("sessions", "ten chats of three turns, four requests at once", _sessions),
    Workload("mix", "a prompt of 2,000 words comes while three streams run", _mix),
)
