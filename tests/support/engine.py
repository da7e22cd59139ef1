"""The real client and the real engine around a scripted backend: the engine process is a thread here."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.engine.client import EngineClient, EngineState
from server.engine.options import DiskOptions, EngineOptions, ModelOptions, SchedulerOptions
from server.engine.process import EngineProcess
from tests.support.scripted import ScriptedBackend


@asynccontextmanager
async def scripted_client(
    backend: ScriptedBackend | None = None,
    scheduler: SchedulerOptions | None = None,
    *,
    n_owners: int = 1,
    model_path: str = "scripted",
    disk: DiskOptions | None = None,
) -> AsyncIterator[EngineClient]:
    """A client whose engine is ready. When the block is left the engine has ended."""
    backend = backend if backend is not None else ScriptedBackend(reply=lambda prompt: f"You said {prompt}.")
    scheduler = scheduler if scheduler is not None else SchedulerOptions()
    ours, theirs = socket.socketpair()
    process = EngineProcess(theirs, lambda options, on_progress: backend, leave=lambda: None)
    thread = threading.Thread(target=process.run, name="engine", daemon=True)
    thread.start()
    client = EngineClient(max_waiting=scheduler.max_waiting, n_owners=n_owners)
    options = EngineOptions(ModelOptions(model_path), scheduler, disk=disk or DiskOptions())
    connected = asyncio.create_task(client.connect(ours, options))
    while client.status.state is not EngineState.READY:
        await client.changed()
    try:
        yield client
    finally:
        client.ask_to_stop()
        await asyncio.to_thread(thread.join, 10)
        theirs.shutdown(socket.SHUT_RDWR)  # wakes the input thread, which a close would not
        theirs.close()
        await connected
        assert not thread.is_alive(), "the engine did not stop"
