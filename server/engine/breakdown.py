"""What a context and its model hold, in bytes for each buffer type: llama_get_memory_breakdown (src/llama-ext.h).

It returns a C++ std::map, which is read here through libstdc++'s layout; elsewhere (another processor or C++ library)
nothing is read.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from server.engine.ggml import Ggml
from server.engine.messages import DeviceInfo, DeviceMemory

HOST = "host"  # the name of the machine's own memory
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"


class BufferBytes(msgspec.Struct, frozen=True):
    """Bytes in one buffer type ("CUDA0", "CPU"): weights, cache, compute buffer."""

    name: str
    model: int
    context: int
    compute: int


class _Node(ctypes.Structure):
    """A node of libstdc++'s std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data> (src/llama-ext.h)."""

    _fields_ = [
        ("colour", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("buffer_type", ctypes.c_void_p),
        ("model", ctypes.c_size_t),
        ("context", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    ]


class _Map(ctypes.Structure):
    """libstdc++'s std::map: a comparator without state, the header node (its parent is the root), the count."""

    _fields_ = [
        ("compare", ctypes.c_size_t),
        ("colour", ctypes.c_size_t),
        ("root", ctypes.c_void_p),
        ("leftmost", ctypes.c_void_p),
        ("rightmost", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    ]


def read_breakdown(bindings: ModuleType, ggml: Ggml, context: int) -> list[BufferBytes] | None:
    """None where the map cannot be read. The nodes, some hundred bytes, are not freed."""
    if platform.machine() != "x86_64" or not _has_libstdcxx():
        return None
    try:
        function = bindings._lib[_BREAKDOWN]
    except AttributeError:
        return None
    result = _Map()
    # a class that is returned by value is written to the address in a hidden first argument (Itanium C++ ABI)
    function.argtypes, function.restype = [ctypes.POINTER(_Map), ctypes.c_void_p], ctypes.c_void_p
    function(ctypes.byref(result), context)
    nodes = list(_walk(result.root))
    if len(nodes) != result.count:
        return None
    return [BufferBytes(ggml.buffer_name(node.buffer_type), node.model, node.context, node.compute) for node in nodes]


def _walk(address: int | None) -> Iterator[_Node]:
    if address:
        node = _Node.from_address(address)
        yield from _walk(node.left)
        yield node
        yield from _walk(node.right)


def _has_libstdcxx() -> bool:
    try:
        return "libstdc++" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def planned_and_actual(
    planned: Mapping[str, int], buffers: Sequence[BufferBytes] | None, devices: Sequence[DeviceInfo]
) -> list[DeviceMemory]:
    """Beside what was planned for each device what llama.cpp holds there. A buffer type has its device's name, or that
    and more (CUDA_Host is memory of the host); an RPC device's has the number on its server and the endpoint, which is
    the device's description."""
    if not planned:
        return []
    names = {device.name: device.name for device in devices if device.kind != "cpu"}
    names |= {f"RPC0[{device.description}]": device.name for device in devices if device.name.startswith("RPC")}
    actual = dict.fromkeys(planned, 0)
    for buffer in buffers or ():
        name = names.get(buffer.name, HOST)
        actual[name] = actual.get(name, 0) + buffer.model + buffer.context + buffer.compute
    return [
        DeviceMemory(name, n_bytes, actual[name] if buffers is not None else None) for name, n_bytes in planned.items()
    ]
