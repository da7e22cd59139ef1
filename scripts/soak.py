"""Mixed load on a server of its own for some minutes: chats, clients that leave, long prompts, wrong requests.

    .venv/bin/python scripts/soak.py --minutes 30 --gguf MODEL [-- SERVER FLAGS]

At the end every slot must be idle, every request must be in the metrics as its client saw it, and the memory of both
processes must be within 5 % of what it was after a sixth of the time. Exit code 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.server_process import ServerProcess

WORDS = "river stone window letter garden engine market paper silver morning table bridge cloud forest".split()
WRONG: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b'{"messages": []}', 400),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}', 400),
    (b'{"messages": [{"role": "user", "content": "hi"}], "model": "no-such-model"}', 404),
    (b'{"messages": [{"role": "user", "content": "hi"}], "grammar": "root ::= ("}', 400),
]
MARGIN = 1.05


class Soak:
    def __init__(self, server: ServerProcess, n_ctx: int, seed: int) -> None:
        self.server = server
        self.n_ctx = n_ctx
        self.random = random.Random(seed)
        self.seen: Counter[int] = Counter()  # statuses; 0: we left
        self.wrong: list[str] = []
        self.memory: list[tuple[float, int, int]] = []

    def text(self, n_words: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(n_words))

    def body(self, n_words: int, max_tokens: int, *, stream: bool) -> dict[str, object]:
        messages = [{"role": "user", "content": self.text(n_words)}]
        return {"messages": messages, "max_tokens": max_tokens, "stream": stream, "n": self.random.choice([1, 1, 1, 2])}

    async def post(self, session: aiohttp.ClientSession, data: bytes, leave_after_s: float | None = None) -> int:
        """The status; 0 when we left before the end of the answer."""
        try:
            async with asyncio.timeout(leave_after_s):
                async with session.post(f"{self.server.url}/v1/chat/completions", data=data) as answer:
                    content = await answer.read()
                    if answer.status == 200 and b'"error"' in content:
                        self.wrong.append(content[-300:].decode(errors="replace"))
                    return answer.status
        except TimeoutError:
            return 0

    async def worker(self, session: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            kind = self.random.random()
            expected = {200}
            leave: float | None = None
            if kind < 0.15:
                data, status = self.random.choice(WRONG)
                expected = {status}
            elif kind < 0.20:
                data, expected = json.dumps(self.body(self.n_ctx * 2, 4, stream=True)).encode(), {400}
            elif kind < 0.30:
                data = json.dumps(self.body(self.n_ctx // 3, 8, stream=self.random.random() < 0.5)).encode()
            else:
                data = json.dumps(
                    self.body(20, self.random.randrange(1, 60), stream=self.random.random() < 0.7)
                ).encode()
            if kind > 0.75:
                leave, expected = self.random.uniform(0.0, 1.5), {0, 200}
            status = await self.post(session, data, leave)
            self.seen[status] += 1
            if status not in expected:
                self.wrong.append(f"{status} instead of {expected} for {data[:200]!r}")

    async def watch_memory(self, began: float) -> None:
        while True:
            engine = self.server.engine_pid
            if engine is not None:
                self.memory.append((time.monotonic() - began, resident_kib(self.server.pid), resident_kib(engine)))
            await asyncio.sleep(5)

    async def run(self, minutes: float, n_workers: int) -> bool:
        began = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
            watching = asyncio.create_task(self.watch_memory(began))
            await asyncio.gather(*(self.worker(session, began + minutes * 60) for _ in range(n_workers)))
            await asyncio.sleep(3)
            watching.cancel()
            metrics = await (await session.get(f"{self.server.url}/metrics")).text()
            slots = await (await session.get(f"{self.server.url}/slots")).json()
        return self.judge(metrics, slots, minutes * 60)

    def judge(self, metrics: str, slots: list[dict[str, object]], seconds: float) -> bool:
        faults = list(self.wrong[:10])
        busy = [slot["id"] for slot in slots if slot["is_processing"]]
        if busy:
            faults.append(f"slots {busy} are not idle")
        counted = {
            int(match[1]): int(float(match[2]))
            for match in re.finditer(
                r'glmserve_http_requests_total\{route="/v1/chat/completions",status="(\d+)"\} (\S+)', metrics
            )
        }
        total = sum(counted.values())
        # One that we left at once may never have been sent.
        if not sum(self.seen.values()) - self.seen[0] <= total <= sum(self.seen.values()):
            faults.append(f"{sum(self.seen.values())} requests were sent, the metrics have {total}")
        for status, n in self.seen.items():
            # An answer may have been complete in the server when its client left.
            if status not in (0, 200) and counted.get(status, 0) != n:
                faults.append(f"status {status}: {n} seen, the metrics have {counted.get(status, 0)}")
        submitted = value(metrics, "glmserve_jobs_submitted_total")
        ended = sum(
            value(metrics, f'glmserve_jobs_ended_total{{outcome="{how}"}}')
            for how in ("finished", "failed", "cancelled")
        )
        if submitted != ended:
            faults.append(f"{submitted} jobs were submitted, {ended} have ended")
        early = next(row for row in self.memory if row[0] >= seconds / 6)
        late = self.memory[-1]
        for name, column in (("HTTP process", 1), ("engine process", 2)):
            print(f"{name}: {early[column]} KiB after {early[0]:.0f} s, {late[column]} KiB after {late[0]:.0f} s")
            if late[column] > early[column] * MARGIN:
                faults.append(f"the {name} grew from {early[column]} to {late[column]} KiB")
        print(f"requests by status as seen (0: we left): {dict(sorted(self.seen.items()))}")
        print(f"requests by status in the metrics: {dict(sorted(counted.items()))}; jobs {submitted:.0f} = {ended:.0f}")
        for fault in faults:
            print(f"FAULT: {fault}")
        return not faults


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def value(metrics: str, name: str) -> float:
    return next((float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(f"{name} ")), 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--gguf", help="model; the demo model when left out")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--ctx", type=int, default=1024, help="tokens per slot")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    given = parser.parse_args()
    model = ["--gguf", given.gguf] if given.gguf else ["--demo"]
    flags = [*model, "--parallel", "4", "--ctx-size", str(4 * given.ctx), *given.flags]
    with ServerProcess(*flags) as server:
        good = asyncio.run(Soak(server, given.ctx, given.seed).run(given.minutes, given.workers))
        code = server.stop()
        print(f"the server ended with {code}; warnings it wrote:")
        print("\n".join([line for line in server.output.splitlines() if " warn " in line or " error " in line][:20]))
    return 0 if good and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
