from __future__ import annotations

import re
import subprocess
import sys

import pytest

from server.engine.ggml import Ggml, list_devices, load_bindings
from server.errors import ConfigError, LoadError


@pytest.fixture
def ggml() -> Ggml:
    return Ggml(load_bindings())


def test_the_cpu_is_a_device_with_memory() -> None:
    (cpu,) = [device for device in list_devices() if device.kind == "cpu"]
    assert cpu.name == "CPU"
    assert 0 < cpu.free_bytes <= cpu.total_bytes


def test_devices_are_found_by_name(ggml: Ggml) -> None:
    cpu = ggml.device("CPU")
    assert cpu is not None
    assert not cpu.is_gpu
    assert cpu.handle in [device.handle for device in ggml.devices()]
    assert ggml.device("no such device") is None


def test_buffer_types_have_the_names_of_override_tensor(ggml: Ggml) -> None:
    assert ggml.buffers()["CPU"] == ggml.cpu_buffer()


def test_a_backend_library_that_is_missing_is_refused(ggml: Ggml) -> None:
    with pytest.raises(ConfigError, match=r"libnone\.so"):
        ggml.load_backend("/nowhere/libnone.so")


def test_rpc_servers_that_cannot_be_used_are_refused(ggml: Ggml) -> None:
    """Without the RPC backend because of it, with it because nobody listens: never the abort that llama.cpp makes."""
    with pytest.raises(ConfigError, match="--rpc"):
        ggml.add_rpc_servers(("127.0.0.1:1",))


def test_the_commit_is_a_short_hash_or_unknown(ggml: Ggml) -> None:
    assert all(char in "0123456789abcdef" for char in ggml.commit())


def test_a_missing_library_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = load_bindings()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/nowhere")
    with pytest.raises(LoadError, match=r"/nowhere/libggml\.so\.0"):
        Ggml(bindings)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("libcuda.so.1", "of the NVIDIA driver is missing; start the container with --gpus all"),
        ("libcublas.so.13", "CUDA's libcublas.so.13 is missing; install CUDA's runtime and cuBLAS"),
        ("libcudart.so.12", "LD_LIBRARY_PATH=/usr/local/cuda/lib64"),
        ("libgomp.so.1", "apt-get install libgomp1"),
        ("libibverbs.so.1", "libibverbs.so.1 is missing; install it, or rebuild"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_way_out(
    name: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError(
            f"Failed to load shared library '/x/libllama.so': {name}: cannot open shared object file: No such file"
        )

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(LoadError, match=re.escape(way_out)) as caught:
        load_bindings()
    assert "Failed to load" not in caught.value.message


def test_another_fault_of_the_library_is_mended_by_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise OSError("/x/libllama.so: undefined symbol: ggml_x")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(LoadError, match="undefined symbol: ggml_x; rebuild it with `make install`"):
        load_bindings()


def test_bindings_load_without_the_package_and_without_the_second_ggml() -> None:
    """A fresh process: llama_cpp/__init__ must not run, and libggml.so must stay closed beside libggml.so.0."""
    code = (
        "import sys; from server.engine.ggml import list_devices; list_devices();"
        "assert not hasattr(sys.modules['llama_cpp'], 'Llama');"
        "print(*{line.split('/')[-1].strip() for line in open('/proc/self/maps') if 'libggml' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert any(name.startswith("libggml.so.0") for name in loaded)
    assert "libggml.so" not in loaded
