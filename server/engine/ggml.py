"""The native libraries: how llama_cpp's bindings are imported, and ggml's devices, which those bindings lack.

Device functions are declared over `libggml.so.0`, the very file that libllama loads. The wheel also holds a plain
`libggml.so`; it is a second copy with its own, empty device registry, and must never be opened.
Source of the declarations: ggml/include/ggml-backend.h, ggml.h.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from server.engine.messages import DeviceInfo
from server.errors import ConfigError, LoadError

_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type
_CONNECT_TIMEOUT_S = 5.0
_HANDLE = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_commit": (_TEXT, []),
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    "ggml_backend_dev_get": (_HANDLE, [ctypes.c_size_t]),
    "ggml_backend_dev_by_name": (_HANDLE, [_TEXT]),
    "ggml_backend_dev_name": (_TEXT, [_HANDLE]),
    "ggml_backend_dev_description": (_TEXT, [_HANDLE]),
    "ggml_backend_dev_type": (ctypes.c_int, [_HANDLE]),
    "ggml_backend_dev_memory": (
        None,
        [_HANDLE, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
    ),
    "ggml_backend_dev_buffer_type": (_HANDLE, [_HANDLE]),
    "ggml_backend_cpu_buffer_type": (_HANDLE, []),
    "ggml_backend_buft_name": (_TEXT, [_HANDLE]),
    "ggml_backend_load": (_HANDLE, [_TEXT]),
    "ggml_backend_load_all_from_path": (None, [_TEXT]),
    "ggml_backend_register": (None, [_HANDLE]),
    "ggml_backend_reg_by_name": (_HANDLE, [_TEXT]),
    "ggml_backend_reg_get_proc_address": (_HANDLE, [_HANDLE, _TEXT]),
}


_MISSING_LIBRARY = re.compile(r"(lib[^\s:/]+\.so[^\s:/]*): cannot open shared object file")


def load_bindings() -> ModuleType:
    """The module `llama_cpp.llama_cpp`, without running the package's `__init__`: that one imports chat templates,
    caches and pydantic helpers, 0.2 s in every engine start. Raises LoadError when the native library cannot load."""
    if "llama_cpp" not in sys.modules:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None:
            raise LoadError("the package llama-cpp-python is not installed; run `make install`")
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise LoadError(f"llama.cpp's library cannot be loaded: {_cause_and_way_out(str(error))}") from error


def _cause_and_way_out(reason: str) -> str:
    """Rebuilding helps where the library itself is wrong, not where one that it needs is missing."""
    missing = _MISSING_LIBRARY.search(reason)
    if missing is None:
        return f"{reason}; rebuild it with `make install`"
    name = missing[1]
    if name.startswith("libcuda.so"):
        return (
            f"it was built for GPUs, and {name} of the NVIDIA driver is missing; start the container with --gpus all "
            f"or install the driver, or build for the CPU alone: GLMSERVE_CUDA=off make install"
        )
    if name.startswith(("libcudart", "libcublas", "libnvrtc")):
        return (
            f"CUDA's {name} is missing; install CUDA's runtime and cuBLAS of this version, or name the folder they are "
            f"in: LD_LIBRARY_PATH=/usr/local/cuda/lib64"
        )
    if name.startswith("libgomp"):
        return f"{name} is missing; install it (Debian, Ubuntu: apt-get install libgomp1)"
    return f"{name} is missing; install it, or rebuild llama.cpp with `make install`"


def library_directory(bindings: ModuleType) -> Path:
    """Where the bindings take their shared libraries from."""
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(str(bindings.__file__)).parent / "lib")


@dataclass(frozen=True, slots=True)
class Device:
    handle: int
    info: DeviceInfo

    @property
    def is_gpu(self) -> bool:
        return self.info.kind in ("gpu", "igpu")


class Ggml:
    """Typed access to the device registry. Handles are plain addresses, valid as long as the process lives."""

    def __init__(self, bindings: ModuleType) -> None:
        directory = library_directory(bindings)
        path = directory / "libggml.so.0"
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise LoadError(f"{path} cannot be loaded: {_cause_and_way_out(str(error))}") from error
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        if not self._lib.ggml_backend_dev_count():
            # A portable build: devices are libraries beside this one, and of the CPU's the best for this processor is
            # taken. llama.cpp itself would look for them beside the program, which is Python.
            self._lib.ggml_backend_load_all_from_path(os.fsencode(directory))
            if not self._lib.ggml_backend_dev_count():
                raise LoadError(
                    f"llama.cpp has no device to compute on: none of the libraries libggml-*.so in {directory} fits "
                    f"this machine; rebuild llama-cpp-python with `make install`"
                )

    # ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def devices(self) -> list[Device]:
        """All registered devices, in llama.cpp's order."""
        return [self._device(self._lib.ggml_backend_dev_get(i)) for i in range(self._lib.ggml_backend_dev_count())]

    def device(self, name: str) -> Device | None:
        handle = self._lib.ggml_backend_dev_by_name(name.encode())
        return self._device(handle) if handle else None

    def info(self, handle: int) -> DeviceInfo:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        kind = self._lib.ggml_backend_dev_type(handle)
        return DeviceInfo(
            name=_text(self._lib.ggml_backend_dev_name(handle)),
            description=_text(self._lib.ggml_backend_dev_description(handle)),
            kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else f"kind {kind}",
            free_bytes=free.value,
            total_bytes=total.value,
        )

    def _device(self, handle: int) -> Device:
        return Device(handle, self.info(handle))

    def load_backend(self, path: str) -> None:
        """Load and register a backend library (libggml-rpc.so, say)."""
        if not self._lib.ggml_backend_load(os.fsencode(path)):
            raise ConfigError(f"the backend library '{path}' cannot be loaded into this llama.cpp build")

    def add_rpc_servers(self, endpoints: tuple[str, ...]) -> None:
        """Make the devices of rpc-server processes at `host:port` appear in `devices()`."""
        registry = self._lib.ggml_backend_reg_by_name(b"RPC")
        if not registry:
            raise ConfigError(
                "--rpc needs llama.cpp's RPC backend, which this build lacks; rebuild llama-cpp-python with "
                "CMAKE_ARGS=-DGGML_RPC=ON, or drop --rpc"
            )
        address = self._lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
        add_server = ctypes.CFUNCTYPE(_HANDLE, _TEXT)(address)
        for endpoint in endpoints:
            _require_listener(endpoint)  # llama.cpp aborts the process when nobody answers
            self._lib.ggml_backend_register(add_server(endpoint.encode()))

    # ── buffer types ─────────────────────────────────────────────────────────────────────────────────────────────────

    def cpu_buffer(self) -> int:
        handle: int = self._lib.ggml_backend_cpu_buffer_type()
        return handle

    def buffers(self) -> dict[str, int]:
        """Buffer types by the names that --override-tensor uses ("CPU", "CUDA0")."""
        return {_text(self._lib.ggml_backend_buft_name(handle)): handle for handle in self._buffer_handles()}

    def _buffer_handles(self) -> Iterator[int]:
        for device in self.devices():
            handle = self._lib.ggml_backend_dev_buffer_type(device.handle)
            if handle:
                yield handle

    def buffer_name(self, handle: int) -> str:
        """Name of a buffer type, such as "CUDA0"."""
        return _text(self._lib.ggml_backend_buft_name(handle))

    def commit(self) -> str:
        """Short commit hash that the library was built from; empty if it does not know."""
        commit = _text(self._lib.ggml_commit()).removesuffix("-dirty")
        return "" if commit == "unknown" else commit


def list_devices(rpc_servers: tuple[str, ...] = ()) -> list[DeviceInfo]:
    """The devices that llama.cpp sees on this machine, the CPU among them, and those of RPC servers."""
    ggml = Ggml(load_bindings())
    if rpc_servers:
        ggml.add_rpc_servers(rpc_servers)
    return [device.info for device in ggml.devices()]


def _require_listener(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--rpc: no rpc-server answers at '{endpoint}' ({error}); start it first, or correct the host:port"
        ) from error


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", errors="replace")
