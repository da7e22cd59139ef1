"""The command: read the flags, send the workloads in turns, print the report."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import aiohttp

from server.ops.bench.client import BenchError, Client
from server.ops.bench.demo import demo_server
from server.ops.bench.measures import Run, Summary, summarize
from server.ops.bench.report import json_lines, table
from server.ops.bench.workloads import WORKLOADS, Workload

_DEMO_FLAGS = "--parallel 4 --kv-unified --ctx-size 16384 --log-level warn"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m server.ops.bench",
        description="Measure a server, alone or in turns with a second one. Only ratios of one sitting mean much.",
    )
    parser.add_argument("--url", help="the server to measure; left out: one is started with the demo model")
    parser.add_argument("--against", metavar="URL", help="a second server, measured in turns; ratios are ours / theirs")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated workloads; see --list")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="passages of each workload (1)")
    parser.add_argument("--key", help="API key, sent to both servers")
    parser.add_argument("--model", help="model name to ask both servers for; left out: the first each one lists")
    parser.add_argument("--seed", type=int, default=1, help="of the words that are sent (1)")
    parser.add_argument("--flags", default=_DEMO_FLAGS, help=f"flags of the server that is started ({_DEMO_FLAGS})")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    parser.add_argument("--list", action="store_true", help="list the workloads and end")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    names = [workload.name for workload in WORKLOADS]
    wanted = options.only.split(",") if options.only else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only: there is no workload '{unknown[0]}'; choose from {', '.join(names)}")
    options.workloads = [workload for workload in WORKLOADS if workload.name in wanted]
    return options


async def measure(
    clients: Sequence[Client], workloads: Sequence[Workload], *, rounds: int, seed: int
) -> list[list[Summary]]:
    """For each workload a summary for each server. Servers take turns, and who is first changes with the round."""
    for client in clients:
        await client.ask([{"role": "user", "content": "Say hello."}], 8)
    groups: list[list[Summary]] = []
    for workload in workloads:
        runs: list[list[Run]] = [[] for _ in clients]
        for number in range(rounds):
            turns = list(zip(clients, runs, strict=True))
            for client, done in turns if number % 2 == 0 else reversed(turns):
                print(f"{workload.name} {number + 1}/{rounds} {client.url}", file=sys.stderr, flush=True)
                done.append(await workload.run(client, Random(f"{seed} {workload.name} {number}")))
        groups.append([summarize(workload.name, client.url, done) for client, done in zip(clients, runs, strict=True)])
    return groups


async def run(options: argparse.Namespace) -> str:
    async with AsyncExitStack() as stack:
        url = options.url or await stack.enter_async_context(demo_server(shlex.split(options.flags)))
        urls = [url, *([options.against] if options.against else [])]
        clients = [
            await stack.enter_async_context(Client(address, key=options.key, model=options.model)) for address in urls
        ]
        groups = await measure(clients, options.workloads, rounds=options.rounds, seed=options.seed)
    return json_lines(groups) if options.json else table(groups)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.list:
        print("\n".join(f"{workload.name:10} {workload.about}" for workload in WORKLOADS))
        return 0
    status = 0
    try:
        print(asyncio.run(run(options)))
    except* (BenchError, aiohttp.ClientError, TimeoutError) as group:
        print(f"error: {_first(group)}", file=sys.stderr)
        status = 1
    return status


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error in a nest of groups."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
