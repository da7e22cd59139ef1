"""The engine process (its program is server/worker.py). Moves messages between a socket and the Engine.

The main thread owns llama.cpp and runs the step loop. An input thread reads commands, sends a heartbeat every second,
and ends the process the moment the HTTP process is gone. Questions about the vocabulary have threads of their own, so
that they wait for no decode and nothing waits for them; constraints are compiled on another.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from server.engine.backend import Backend
from server.engine.background import Worker
from server.engine.disk_folder import DiskFolder
from server.engine.disk_tier import DiskStore
from server.engine.engine import Engine
from server.engine.identity import identity_of
from server.engine.messages import (
    ActOnSlot,
    CallFailed,
    Cancel,
    Command,
    Detokenize,
    Detokenized,
    Event,
    Heartbeat,
    LoadFailed,
    Loading,
    Pieces,
    Prepare,
    Prepared,
    Question,
    Ready,
    SlotRefusal,
    SlotRefused,
    Stop,
    Submit,
    Tokenize,
    TokenPieces,
    Tokens,
)
from server.engine.options import EngineOptions
from server.engine.slot_files import SlotFiles
from server.engine.wire import EngineSocket
from server.errors import InvalidRequest, ModelFileError, StartError

HEARTBEAT_S = 1.0
SNAPSHOT_S = 0.1
VOCABULARY_THREADS = 2

OnProgress = Callable[[str, float], None]
Load = Callable[[EngineOptions, OnProgress], Backend]


class EngineProcess:
    """The life of one engine: options in, load, serve until Stop or until the other side is gone.

    `leave` ends the process from the input thread while the main thread may be deep in native code.
    """

    def __init__(self, sock: socket.socket, load: Load, leave: Callable[[], None]) -> None:
        self._socket = EngineSocket(sock)
        self._load = load
        self._leave = leave
        self._inbox: queue.SimpleQueue[tuple[float, Command | None]] = queue.SimpleQueue()  # with the time of arrival
        # Megabytes of text take seconds to tokenise; meanwhile other questions, cancels and heartbeats must pass.
        self._vocabulary_threads = ThreadPoolExecutor(VOCABULARY_THREADS, thread_name_prefix="engine-vocabulary")
        self._constraint_thread = ThreadPoolExecutor(1, thread_name_prefix="engine-constraint")
        self._backend: Backend | None = None
        self._slot_files: SlotFiles | None = None
        self._step_began: float | None = None
        self._n_steps = 0
        self._snapshot_sent = 0.0

    def run(self) -> int:
        """Exit code: 0 after Stop, 1 when the model could not be loaded."""
        options = self._socket.receive_options()
        threading.Thread(target=self._read_commands, name="engine-input", daemon=True).start()
        began = time.monotonic()
        try:
            folder = DiskFolder.open(Path(options.disk.cache_folder)) if options.disk.cache_folder else None
            backend = self._load(options, self._tell_progress)
            if options.model.warmup:
                self._tell_progress("warming up", 1.0)
                backend.warm_up()
            engine = self._build(options, backend, folder)
        except StartError as error:
            self._socket.send([LoadFailed(error.message)])
            return 1
        self._backend = backend
        load_ms = (time.monotonic() - began) * 1e3
        self._socket.send([Ready(backend.facts, load_ms), engine.snapshot()])
        self._constraint_thread.submit(backend.warm_up_constraints)
        engine.close(self._serve(engine))
        if self._slot_files is not None:
            self._slot_files.close()
        for threads in (self._vocabulary_threads, self._constraint_thread):
            threads.shutdown(cancel_futures=True)
        backend.close()
        return 0

    def _build(self, options: EngineOptions, backend: Backend, folder: DiskFolder | None) -> Engine:
        """Raises ModelFileError and ConfigError."""
        disk = options.disk
        if folder is None and not disk.slot_folder:
            return Engine(backend, options.scheduler)
        try:
            identity = identity_of(options.model, backend.facts)
        except OSError as error:
            raise ModelFileError(f"cannot read '{options.model.path}': {error.strerror or error}") from None
        store = None
        if folder is not None:
            writer, reader = (Worker(f"engine-disk-{what}", self._wake) for what in ("write", "read"))
            store = DiskStore(folder, identity, disk.cache_limit_bytes, writer, reader)
        engine = Engine(backend, options.scheduler, disk=store)
        if disk.slot_folder:
            worker = Worker("engine-slot-files", self._wake)
            tell = self._socket.send
            self._slot_files = SlotFiles(
                engine.resting, Path(disk.slot_folder), identity, worker, lambda answer: tell([answer])
            )
        return engine

    def _wake(self) -> None:
        """From any thread: there is something for the main one to collect."""
        self._inbox.put((time.perf_counter(), None))

    # ── main thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, engine: Engine) -> float:
        """Until Stop: how many seconds may be spent on saving."""
        while True:
            for arrived_at, command in self._commands(wait=not engine.has_work):
                self._step_began = time.monotonic()
                match command:
                    case Submit(job):
                        engine.submit(job, arrived_at)
                    case Cancel(job_id):
                        engine.cancel(job_id)
                    case ActOnSlot():
                        self._act_on_slot(command)
                    case Stop(save_s):
                        return save_s
            if self._slot_files is not None:
                self._slot_files.collect()
            self._step_began = time.monotonic()
            events: list[Event] = list(engine.step())
            self._step_began = None
            self._n_steps += 1
            now = time.monotonic()
            if not engine.has_work or now - self._snapshot_sent >= SNAPSHOT_S:
                events.append(engine.snapshot())
                self._snapshot_sent = now
            if events:
                self._socket.send(events)

    def _act_on_slot(self, wish: ActOnSlot) -> None:
        if self._slot_files is None:
            answer = SlotRefused(wish.call_id, SlotRefusal.INVALID, "there is no folder for slots (--slot-save-path)")
            self._socket.send([answer])
        else:
            self._slot_files.act(wish)

    def _commands(self, *, wait: bool) -> list[tuple[float, Command | None]]:
        commands = [self._inbox.get()] if wait else []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def tell(self, event: Event) -> None:
        """For what a load has to say beside its progress."""
        self._socket.send([event])

    def _tell_progress(self, phase: str, progress: float) -> None:
        self._socket.send([Loading(progress, phase)])

    # ── input thread ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_commands(self) -> None:
        heartbeat_due = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                if now >= heartbeat_due:
                    heartbeat_due = now + HEARTBEAT_S
                    began = self._step_began
                    self._socket.send([Heartbeat((now - began) * 1e3 if began is not None else 0.0, self._n_steps)])
                commands = self._socket.receive(max(heartbeat_due - now, 0.0))
                if commands is None:
                    self._leave()
                    return
                for command in commands:
                    self._take(command)
        except OSError:
            self._leave()

    def _take(self, command: Command) -> None:
        match command:
            case Tokenize() | Detokenize() | TokenPieces():
                self._vocabulary_threads.submit(self._reply, command)
            case Prepare():
                self._constraint_thread.submit(self._reply, command)
            case _:
                self._inbox.put((time.perf_counter(), command))

    def _reply(self, question: Question) -> None:
        try:
            answer = self._answer(question)
        except BaseException as error:  # noqa: BLE001  an answer there must be, a panic of Rust's included
            answer = CallFailed(question.call_id, f"{type(error).__name__}: {error}")
        with suppress(OSError):
            self._socket.send([answer])

    def _answer(self, question: Question) -> Event:
        backend = self._backend
        if backend is None:
            return CallFailed(question.call_id, "the model is not loaded yet")
        if isinstance(question, Detokenize | TokenPieces):
            n_vocab = backend.facts.n_vocab
            wrong = next((token for token in question.tokens if not 0 <= token < n_vocab), None)
            if wrong is not None:
                return CallFailed(question.call_id, f"token {wrong} is not in the vocabulary of {n_vocab} tokens")
        match question:
            case Tokenize(call_id, spans, add_special):
                return Tokens(call_id, backend.tokenize(spans, add_special=add_special))
            case Detokenize(call_id, tokens, show_special):
                return Detokenized(call_id, backend.detokenize(tokens, show_special=show_special))
            case TokenPieces(call_id, tokens):
                return Pieces(call_id, [backend.piece(token, show_special=True) for token in tokens])
            case Prepare(call_id, constraint):
                try:
                    return Prepared(call_id, warnings=backend.prepare(constraint))
                except InvalidRequest as error:
                    return Prepared(call_id, refusal=error.message)


def _die_with_parent(parent: int) -> None:
    """No orphan, also when the HTTP process is killed -9 while this one is loading 400 GB (Linux: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt(arguments: list[str]) -> socket.socket:
    """Make this process the engine of the one that started it: the socket to that one. Arguments: FD PARENT."""
    fd, parent = int(arguments[0]), int(arguments[1])
    _die_with_parent(parent)
    faulthandler.enable()
    # Ctrl-C and a service manager signal the whole group; this process ends when its socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return socket.socket(fileno=fd)
