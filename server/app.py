"""Builds the parts and joins them, starts and stops them in order.

start: bind the addresses → start the engine process → answer HTTP (503 while the model loads) → ready
stop:  no new connection → running requests finish, up to the grace → engine process ends → exit
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import server
from server.api.options import HttpOptions, TlsOptions
from server.config import Config
from server.engine.client import EngineClient, EngineState
from server.engine.messages import Failed, FailureKind, Job
from server.engine.supervisor import Supervisor
from server.errors import ConfigError, PortError, StartError
from server.ops.logs import set_up_logging
from server.ops.startup import LoadProgress, curl_line, memory_lines, ready_lines, say

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

MIN_FILES = 4096


def run(config: Config) -> int:
    """Serve until told to stop. Exit code 0 after a signal. Raises StartError when it cannot start or go on."""
    began = time.monotonic()
    set_up_logging(config.log, secrets=tuple(key.secret for key in config.http.api_keys))
    logger.info("glmserve %s, model %s", server.__version__, config.engine.model.path)
    for warning in config.warnings:
        logger.warning("%s", warning)
    _raise_file_limit()
    _check_tls(config.http.tls)
    sockets = bind(config.http)
    paths = [sock.getsockname() for sock in sockets if sock.family == socket.AF_UNIX]
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Server(config, sockets, began).run())
    finally:
        for sock in sockets:
            sock.close()
        for path in paths:
            Path(path).unlink(missing_ok=True)


def list_devices(rpc_servers: tuple[str, ...]) -> int:
    """Print what llama.cpp can compute on; for --list-devices."""
    from server.engine.ggml import list_devices as devices

    say(
        [
            f"{d.name}: {d.description} ({d.free_bytes >> 20} of {d.total_bytes >> 20} MiB free)"
            for d in devices(rpc_servers)
        ]
    )
    return 0


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def bind(http: HttpOptions) -> list[socket.socket]:
    """Listening sockets for every host of the options. Raises PortError, with the way out, when one cannot be had."""
    sockets: list[socket.socket] = []
    try:
        for host in http.hosts:
            if host.endswith(".sock"):
                sockets.append(_bind_path(host))
                continue
            sockets += _bind_host(host, http.port)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bind_host(host: str, port: int) -> list[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise PortError(f"--host {host}: no such address on this machine ({error}); 0.0.0.0 means all") from error
    sockets = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
            # Bound but silent would let a second server bind too (SO_REUSEADDR) and fail later.
            sock.listen(2048)
        except OSError as error:
            sock.close()
            what = error.strerror or str(error)
            raise PortError(
                f"cannot listen on {host} port {port}: {what}; choose another with --port (or --host), "
                f"or stop what listens there"
            ) from error
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def _bind_path(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) == 0:
                    raise PortError(f"cannot listen on {path}: another server answers there; choose another --host")
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise PortError(f"cannot listen on {path}: {error.strerror}; choose another --host") from error
    sock.setblocking(False)
    return sock


def base_url(http: HttpOptions, sockets: Sequence[socket.socket]) -> str:
    """A URL under which this machine reaches the server."""
    scheme = "https" if http.tls is not None else "http"
    for sock in sockets:
        if sock.family == socket.AF_UNIX:
            continue
        host, port = sock.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"{scheme}://{shown}:{port}{http.prefix}"
    return f"{scheme}://localhost{http.prefix}"


def _check_tls(tls: TlsOptions | None) -> None:
    """Before anything is started: a wrong file would otherwise be told by a traceback of the web server."""
    if tls is None:
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert_file, tls.key_file, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-cert-file '{tls.cert_file}' and --ssl-key-file '{tls.key_file}' are no certificate and key that "
            f"belong together ({error}); both must be PEM files, the key without a passphrase"
        ) from error


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Server:
    def __init__(self, config: Config, sockets: list[socket.socket], began: float) -> None:
        self._config = config
        self._sockets = sockets
        self._began = began
        self._key_names = tuple(dict.fromkeys(key.name for key in config.http.api_keys))
        self._client = EngineClient(
            max_waiting=config.engine.scheduler.max_waiting, n_owners=max(1, len(self._key_names))
        )
        command = (sys.executable, "-m", "server.worker")
        self._supervisor = Supervisor(self._client, config.engine, config.supervisor, command=command)
        self._uvicorn: uvicorn.Server | None = None
        self._failure: StartError | None = None
        self._n_signals = 0
        self._save_until = 0.0  # by the monotonic clock
        self._stop_tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        engine = asyncio.create_task(self._run_engine())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await asyncio.sleep(0)  # the engine process starts while this one imports its web framework
        self._uvicorn = self._build_http()
        announcing = asyncio.create_task(self._announce())
        if not self._n_signals:
            await self._uvicorn.serve(sockets=self._sockets)
        announcing.cancel()
        await self._supervisor.stop(save_s=self._save_s())
        await engine
        if self._failure is not None:
            raise self._failure
        logger.info("stopped")
        return 0

    def _build_http(self) -> uvicorn.Server:
        import uvicorn

        from server.api.app import create_api
        from server.ops.metrics import Metrics
        from server.service import ChatService

        http = self._config.http
        metrics = Metrics(self._key_names)
        self._client.on_snapshot = metrics.observe
        self._service = service = ChatService(self._client, self._config.chat)
        app = create_api(service, self._client, metrics, http, model_path=self._config.engine.model.path)
        options = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=round(http.shutdown_grace_s) + 5,
            ssl_keyfile=http.tls.key_file if http.tls else None,
            ssl_certfile=http.tls.cert_file if http.tls else None,
            h11_max_incomplete_event_size=1 << 16,
        )

        class Server(uvicorn.Server):
            """Signals are ours: they concern the engine too."""

            def capture_signals(self):  # type: ignore[no-untyped-def]
                return nullcontext()

        return Server(options)

    async def _run_engine(self) -> None:
        try:
            await self._supervisor.run()
        except StartError as error:
            self._fail(error)

    async def _announce(self) -> None:
        """Show the load; say where the server answers once it is ready, and again after a restart of the engine."""
        progress = LoadProgress()
        http = self._config.http
        url = base_url(http, self._sockets)
        while True:
            status = self._client.status
            progress.show(status)
            if status.state is EngineState.READY:
                seconds = time.monotonic() - self._began if status.restarts == 0 else self._client.load_s
                for warning in self._client.facts.warnings:
                    logger.warning("%s", warning)
                self._choose_template()
                await self._check_grammar()
                if self._failure is not None:
                    return
                lines = ready_lines(self._client.facts, http.model_names, url, seconds, needs_key=bool(http.api_keys))
                for line in [*lines, *memory_lines(self._client.facts)]:
                    logger.info("%s", line)
                if status.restarts == 0:
                    curl = curl_line(http.model_names[0], url, key=bool(http.api_keys), ca_unknown=http.tls is not None)
                    say(["", "Try it:", f"  {curl}", ""])
            await self._client.changed()

    def _choose_template(self) -> None:
        """A template that is broken is told now, not by the first request: the operator's own ends the start."""
        try:
            logger.info("chat template: %s", self._service.prepare().description)
        except StartError as error:
            self._fail(error)

    async def _check_grammar(self) -> None:
        """A grammar given for all requests is tried now; clients who sent none must not be told that it is wrong."""
        sampling = self._config.http.generation.sampling
        if sampling.grammar is None or self._client.status.state is not EngineState.READY:
            return
        stream = self._client.open(Job(self._client.next_job_id(), [0], sampling, max_tokens=0))
        async for event in stream:
            if isinstance(event, Failed) and event.kind is FailureKind.INVALID:
                self._fail(ConfigError(f"--grammar: {event.message.strip()}"))

    def _fail(self, error: StartError) -> None:
        self._failure = error
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, number: int) -> None:
        self._n_signals += 1
        name = signal.Signals(number).name
        if self._n_signals > 1:
            logger.warning("%s again: stopping now", name)
            self._supervisor.hurry()
            self._stop_now()
            return
        n_running = len(self._client.jobs)
        grace_s = self._config.http.shutdown_grace_s
        running = "1 running request" if n_running == 1 else f"{n_running} running requests"
        logger.info("%s: stopping; %s may finish within %.0f s", name, running, grace_s)
        self._client.stop_accepting()
        self._save_until = time.monotonic() + grace_s
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        task = asyncio.create_task(self._end_grace(grace_s))
        self._stop_tasks.add(task)

    def _save_s(self) -> float:
        """How long the engine may save to disk: what is left of the grace, a third of it where requests took all."""
        if not self._config.engine.disk.cache_folder or self._n_signals != 1:
            return 0.0
        return max(self._save_until - time.monotonic(), self._config.http.shutdown_grace_s / 3)

    async def _end_grace(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        n_cut = len(self._client.jobs)
        cut = "1 request is cut" if n_cut == 1 else f"{n_cut} requests are cut"
        logger.warning("the grace of %.0f s is over: %s", grace_s, cut)
        self._stop_now()

    def _stop_now(self) -> None:
        """Every stream gets its error event before its connection is closed."""
        self._client.fail_all("the server is shutting down", stopping=True)
        if self._uvicorn is not None:
            uvicorn_server = self._uvicorn
            asyncio.get_running_loop().call_later(1.0, lambda: setattr(uvicorn_server, "force_exit", True))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    """Every client is a file descriptor; the usual soft limit of 1,024 is soon reached."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MIN_FILES if hard == resource.RLIM_INFINITY else min(MIN_FILES, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
