"""Keeps one engine process alive: starts it, connects the client to it, watches it, starts it again with back-off.

Gives up when the model cannot be loaded at all, or after so many deaths in a row that trying again helps nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence

import msgspec

from server.engine.client import EngineClient, EngineState, EngineStatus
from server.engine.options import EngineOptions, SupervisorOptions
from server.engine.threads import openmp_environment
from server.errors import LoadError, StartError

log = logging.getLogger(__name__)

N_LOG_LINES = 40
MAX_BACKOFF_S = 30.0
# An abort in llama.cpp starts a debugger on the process first, which can take a minute; faulthandler writes our stack.
ENGINE_ENVIRONMENT = {"GGML_NO_BACKTRACE": "1"}
WATCH_S = 1.0
# The heartbeat thread needs the interpreter lock only; when even that is silent for so long, the process is stuck.
MAX_SILENCE_S = 60.0
# A death by one of these while loading is what quantised kernels on unsuitable CPUs look like (design decision 8).
KERNEL_SIGNALS = {signal.SIGILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE}


class Supervisor:
    """Runs the engine process of `client`. `command` is what to execute; a file descriptor and our process id are added
    to it."""

    def __init__(
        self,
        client: EngineClient,
        engine: EngineOptions,
        options: SupervisorOptions,
        *,
        command: Sequence[str],
    ) -> None:
        self._client = client
        self._engine = engine
        self._options = options
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=N_LOG_LINES)
        self._killed_because = ""
        self._deaths_in_a_row = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Until `stop`. Raises StartError with the reason, the last native lines in it, when it gives up."""
        try:
            await self._run()
        except StartError as error:
            reason = error.message.partition("\n")[0]
            self._client.status = dataclasses.replace(self._client.status, state=EngineState.FAILED, reason=reason)
            self._client.fail_all(reason)
            raise

    async def _run(self) -> None:
        while not self._stop_asked.is_set():
            was_ready = await self._live_once()
            if self._stop_asked.is_set() or self._client.status.state is EngineState.STOPPING:
                self._client.fail_all("the engine ended while the server was stopping")
                return
            reason = self._death_note()
            self._deaths_in_a_row = 1 if was_ready and self._finished_jobs() else self._deaths_in_a_row + 1
            self._consider(reason, was_ready=was_ready)
            log.error("%s; it is started again", reason)
            wait_s = min(MAX_BACKOFF_S, self._options.backoff_s * 2 ** (self._deaths_in_a_row - 1))
            restarts = self._client.status.restarts + 1
            retry_s = max(1, round(wait_s + 1))
            self._client.status = EngineStatus(
                EngineState.RESTARTING, reason=reason, retry_after_s=retry_s, restarts=restarts
            )
            self._client.fail_all(reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), wait_s)

    async def stop(self, *, grace_s: float = 2.0, save_s: float = 0.0) -> None:
        """End the engine process: asked first, killed when it does not go. It may take `save_s` seconds more to save to
        disk what is in memory, unless `hurry` is called. Jobs that are open are failed."""
        self._stop_asked.set()
        self._client.status = EngineStatus(EngineState.STOPPING, restarts=self._client.status.restarts)
        self._client.fail_all("the server is stopping", stopping=True)
        process = self._process
        if process is None:
            return
        self._client.ask_to_stop(save_s)
        ended, hurry = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({ended, hurry}, timeout=grace_s + save_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await ended

    def hurry(self) -> None:
        """Do not wait for anything to be saved."""
        self._hurry.set()

    # ── one life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _live_once(self) -> bool:
        """Start a process and stay with it until it is dead. True if it got ready."""
        self._lines.clear()
        self._killed_because = ""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=ENGINE_ENVIRONMENT | openmp_environment(self._engine.model) | os.environ,
            )
        except OSError as error:
            ours.close()
            raise GaveUp(f"the engine process cannot be started: {error}") from error
        finally:
            theirs.close()
        self._process = process
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lines(process))
            watch = tasks.create_task(self._watch(process))
            await self._client.connect(ours, self._engine)
            # The connection ended: either the process is dead, or it has nothing left to say.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
            if process.returncode is None:
                process.kill()
            await process.wait()
            watch.cancel()
        return self._client.status.state is EngineState.READY

    async def _keep_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the buffer
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._lines.append(text)
                log.info("engine: %s", text)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process whose step does not return. SIGABRT first: faulthandler then writes where it hangs."""
        limit_s = self._options.step_timeout_s
        while True:
            await asyncio.sleep(WATCH_S)
            if self._client.silent_s > MAX_SILENCE_S:
                self._killed_because = f"it gave no sign of life for {MAX_SILENCE_S:.0f} s"
            elif limit_s and self._client.in_step_ms > limit_s * 1e3:
                self._killed_because = f"one step ran longer than {limit_s:.0f} s (--step-timeout)"
            else:
                continue
            log.error("the engine hangs: %s; it is killed", self._killed_because)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGABRT)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 2)
                if process.returncode is None:
                    process.kill()
            return

    # ── after a death ────────────────────────────────────────────────────────────────────────────────────────────────

    def _consider(self, reason: str, *, was_ready: bool) -> None:
        """Raise when another try is pointless; change what may help."""
        if self._client.load_failure is not None and self._client.status.restarts == 0:
            raise LoadError(self._client.load_failure)
        if not was_ready and self._died_by_kernel_signal() and self._engine.model.use_extra_bufts:
            model = msgspec.structs.replace(self._engine.model, use_extra_bufts=False)
            self._engine = msgspec.structs.replace(self._engine, model=model)
            log.warning("the engine died while loading; starting it once more with --no-repack")
            return
        # A first load that dies will die again: the same bytes, the same memory.
        never_ready = not was_ready and self._client.status.restarts == 0
        if never_ready or self._deaths_in_a_row >= self._options.max_failures:
            count = f" {self._deaths_in_a_row} times in a row" if self._deaths_in_a_row > 1 else ""
            tail = "\n  ".join(list(self._lines)[-12:])
            raise GaveUp(f"{reason}{count}; giving up. Its last words:\n  {tail or '(none)'}")

    def _death_note(self) -> str:
        if self._client.load_failure is not None:
            return f"the model could not be loaded: {self._client.load_failure}"
        code = self._process.returncode if self._process is not None else None
        if self._killed_because:
            return f"the engine process hung and was killed: {self._killed_because}"
        if code is not None and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"the engine process was ended by {signal.Signals(-code).name}{hint}"
        return f"the engine process ended with exit code {code}"

    def _died_by_kernel_signal(self) -> bool:
        code = self._process.returncode if self._process is not None else None
        return code is not None and -code in KERNEL_SIGNALS and not self._killed_because

    def _finished_jobs(self) -> bool:
        snapshot = self._client.snapshot
        return snapshot is not None and snapshot.counters.jobs_finished > 0


class GaveUp(StartError):
    """The engine died too often."""

    code = "engine_gave_up"
    exit_code = 7
