"""A server with the demo model for the time of a measurement."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from server.ops.bench.client import BenchError, Client

_START_S = 120.0
_STOP_S = 30.0


@asynccontextmanager
async def demo_server(arguments: Sequence[str]) -> AsyncIterator[str]:
    """Start `python -m server --demo` with more `arguments` on a free port; yield its URL; stop it."""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server", "--demo", "--host", "127.0.0.1", "--port", str(port), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            async with Client(url, timeout_s=10.0) as client:
                try:
                    async with asyncio.timeout(_START_S):
                        while not await client.is_healthy():
                            if process.returncode is not None:
                                log.seek(0)
                                raise BenchError(f"the demo server did not start: {_tail(log.read())}")
                            await asyncio.sleep(0.1)
                except TimeoutError:
                    log.seek(0)
                    raise BenchError(
                        f"the demo server was not ready in {_START_S:.0f} s: {_tail(log.read())}"
                    ) from None
            yield url
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: bytes) -> str:
    return " | ".join(log.decode(errors="replace").strip().splitlines()[-5:])
