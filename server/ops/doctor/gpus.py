"""GPUs: what the driver sees, what llama.cpp sees, and why the second may be less than the first."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.ops.doctor.finding import Finding, Machine, Subject, fail, gib, ok, warn

# The oldest driver for each major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility)
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_DEVICE = re.compile(r"(?m)^(\w+): .* MiB free\)$")  # a line of --list-devices
_IN_USE_BYTES = 1 << 30
_BUSY_WAY_OUT = "stop what uses it (nvidia-smi lists it), or leave the GPU out with --device"


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int
    capability: str  # "8.0"
    persistent: bool


@dataclass(frozen=True, slots=True)
class Driver:
    """What NVML says. `cuda`: the newest CUDA that the driver knows, (13, 0)."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Backend:
    """llama.cpp's CUDA library. `cuda`: the major version that it was linked against."""

    path: Path
    cuda: int | None


def check_gpus(machine: Machine, subject: Subject) -> list[Finding]:
    driver, trouble = read_driver(machine)
    nodes = sorted((machine.root / "dev").glob("nvidia[0-9]*"))
    backend = find_backend(machine)
    asked = subject.gpu_flag
    if driver is None or not driver.gpus:
        return [_no_gpu(machine, nodes, trouble, asked)]
    findings = [_driver_against_toolkit(driver, backend)]
    findings += [_one_gpu(number, gpu) for number, gpu in enumerate(driver.gpus)]
    if not all(gpu.persistent for gpu in driver.gpus):
        findings.append(
            warn(
                "gpu persistence",
                "persistence mode is off: the driver forgets the GPUs between programs, and each start waits for them",
                "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1",
            )
        )
    return [*findings, *check_llama(machine, subject, driver, backend)]


def check_llama(
    machine: Machine, subject: Subject, driver: Driver | None = None, backend: Backend | None = None
) -> list[Finding]:
    """What llama.cpp computes on. GPUs that are there and not used are a fault, unless the command line says so."""
    answer = machine.python("-m", "server", "--list-devices")
    if answer.code:
        last = (answer.err.strip().splitlines() or [f"exit code {answer.code}"])[-1]
        cause, _, way_out = last.removeprefix("error: ").partition("; ")
        return [fail("llama.cpp", f"it does not start: {cause}", way_out or "run `make install` again")]
    devices = _DEVICE.findall(answer.out + "\n" + answer.err)
    gpus = [name for name in devices if not name.upper().startswith(("CPU", "RPC", "BLAS"))]
    listed = ", ".join(devices)
    if gpus or subject.no_gpus:
        return [ok("llama.cpp", f"it computes on {listed}")]
    if driver is not None and driver.gpus:
        cause, way_out = _why_unused(machine, driver, backend)
        count = len(driver.gpus)
        return [
            fail(
                "llama.cpp",
                f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, but llama.cpp sees only {listed}: {cause}",
                f"{way_out}; to compute on the CPU all the same, say so: --n-gpu-layers 0",
            )
        ]
    return [ok("llama.cpp", f"it computes on {listed}")]


def _why_unused(machine: Machine, driver: Driver, backend: Backend | None) -> tuple[str, str]:
    if backend is None:
        return "it was built without CUDA", "build it with CUDA: GLMSERVE_CUDA=on make install"
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "none", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES is '{hidden}', which hides them", "unset CUDA_VISIBLE_DEVICES"
    if backend.cuda is not None and driver.cuda[0] < backend.cuda:
        return (
            f"it was built for CUDA {backend.cuda}, and the driver knows CUDA {_dotted(driver.cuda)}",
            f"{_newer_driver(backend.cuda)}, or build for CUDA {driver.cuda[0]}",
        )
    answer = machine.python("-c", f"import ctypes; ctypes.CDLL({str(backend.path)!r})")
    if answer.code:
        reason = (answer.err.strip().splitlines() or ["no reason given"])[-1]
        return (
            f"its CUDA library cannot be loaded ({reason.removeprefix('OSError: ')})",
            "install what is missing: CUDA's runtime and cuBLAS, as packages nvidia-cuda-runtime and nvidia-cublas",
        )
    return "CUDA does not start", "look at dmesg and nvidia-smi for an error of the driver, and reboot if there is one"


def _no_gpu(machine: Machine, nodes: list[Path], trouble: str, asked: str | None) -> Finding:
    if nodes:
        return fail("gpu", f"there are {len(nodes)} NVIDIA devices in /dev, but the driver does not answer: {trouble}",
                    "reinstall or reload the driver (nvidia-smi must work), then look again")  # fmt: skip
    in_container = (machine.root / ".dockerenv").exists() or (machine.root / "run" / ".containerenv").exists()
    hint = "start the container with --gpus all (NVIDIA container toolkit)" if in_container else "install the driver"
    if asked is not None:
        return fail("gpu", f"{asked} asks for GPUs, but there is none: {trouble}", f"{hint}, or leave {asked} out")
    return ok("gpu", f"none ({trouble}); the CPU computes")


def _driver_against_toolkit(driver: Driver, backend: Backend | None) -> Finding:
    knows = f"driver {driver.version}, which knows CUDA {_dotted(driver.cuda)}"
    if backend is None or backend.cuda is None:
        return ok("gpu driver", knows)
    if driver.cuda[0] < backend.cuda:
        return fail(
            "gpu driver",
            f"{knows}, but llama.cpp was built for CUDA {backend.cuda}",
            f"{_newer_driver(backend.cuda)}, or build for CUDA {driver.cuda[0]}",
        )
    return ok("gpu driver", f"{knows}; llama.cpp was built for CUDA {backend.cuda}")


def _newer_driver(cuda: int) -> str:
    oldest = _OLDEST_DRIVER.get(cuda)
    return f"update the driver to {oldest} or newer" if oldest else "update the driver"


def _one_gpu(number: int, gpu: Gpu) -> Finding:
    check = f"gpu {number}"
    what = f"{gpu.name}, compute capability {gpu.capability}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
    if gpu.total_bytes - gpu.free_bytes > _IN_USE_BYTES:
        return warn(check, f"{what}: something else uses it", _BUSY_WAY_OUT)
    return ok(check, what)


# ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────────


def read_driver(machine: Machine) -> tuple[Driver | None, str]:
    """What NVML says, or None with the reason."""
    nvml = machine.nvml
    if nvml is None:
        return None, "the package nvidia-ml-py is not installed"
    try:
        with _started(nvml):
            cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
            gpus = tuple(_read_gpu(nvml, number) for number in range(int(nvml.nvmlDeviceGetCount())))
            version = _text(nvml.nvmlSystemGetDriverVersion())
            return Driver(version, (cuda // 1000, cuda % 1000 // 10), gpus), "the driver sees no GPU"
    except nvml.NVMLError as error:
        return None, f"{error}" if "Not Found" not in f"{error}" else "no NVIDIA driver"


@contextlib.contextmanager
def _started(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        persistent = bool(nvml.nvmlDeviceGetPersistenceMode(handle))
    except nvml.NVMLError:
        persistent = True  # not every platform has it, and then it is not needed
    return Gpu(
        _text(nvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total), f"{major}.{minor}", persistent
    )


def find_backend(machine: Machine) -> Backend | None:
    """llama.cpp's CUDA library, found without loading it."""
    directory = machine.environment.get("LLAMA_CPP_LIB_PATH")
    if directory is None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            return None
        directory = str(Path(spec.origin).parent / "lib")
    path = Path(directory) / "libggml-cuda.so"
    try:
        match = re.search(rb"\x00libcudart\.so\.(\d+)", path.read_bytes())
    except OSError:
        return None
    return Backend(path, int(match[1]) if match else None)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
