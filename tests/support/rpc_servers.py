"""ggml's RPC servers on loopback: as many devices of kind "gpu" as a test wants, on a machine that has none.

Run as a program it serves: `python -m tests.support.rpc_servers PORT…`, for each port one server with this machine's
CPU behind it, until its standard input is closed. It says "serving" on stderr, which native code does not use, once all
of them listen.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.server_process import ROOT, until

_HANDLE = ctypes.c_void_p


@contextmanager
def rpc_servers(count: int) -> Iterator[tuple[str, ...]]:
    """The endpoints of `count` servers, alive inside the block."""
    ports = _free_ports(count)
    command = [sys.executable, "-m", "tests.support.rpc_servers", *(str(port) for port in ports)]
    # a few threads of OpenMP for each server would fight for the cores of a test machine
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert line == b"serving\n", line + process.stderr.read()
        yield tuple(f"127.0.0.1:{port}" for port in ports)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stderr.close()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


# ── the program ──────────────────────────────────────────────────────────────────────────────────────────────────────


def serve(ports: list[int]) -> None:
    from server.engine.ggml import library_directory, load_bindings

    bindings = load_bindings()
    directory = library_directory(bindings)
    ggml = ctypes.CDLL(str(directory / "libggml.so.0"))
    by_type = ggml.ggml_backend_dev_by_type
    by_type.restype, by_type.argtypes = _HANDLE, [ctypes.c_int]
    start = ctypes.CDLL(str(Path(directory) / "libggml-rpc.so.0")).ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(_HANDLE)]
    devices = (_HANDLE * 1)(by_type(0))
    for port in ports:
        threading.Thread(
            target=start, args=(f"127.0.0.1:{port}".encode(), None, 1, 1, devices), daemon=True, name=f"rpc {port}"
        ).start()
    for port in ports:
        until(f"port {port}", lambda port=port: _listens(port))  # type: ignore[misc]
    print("serving", file=sys.stderr, flush=True)
    sys.stdin.read()
    os._exit(0)  # the threads are in native code for ever


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    serve([int(argument) for argument in sys.argv[1:]])
