"""Whether a model fits this box: planned with its header where it is here, else by its size, which says what is worth
fetching. Both go by the memory that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.cli.tables import size_text
from server.errors import StartError
from server.fit.machine import host_memory
from server.store.local import LocalModel
from server.store.recipes import Quant, Recipe

# Of the memory, what weights may take: the rest is for the cache, for computing and for the system.
_FOR_WEIGHTS = 0.85


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, installed and not free: what runs now may be gone tomorrow."""

    gpus: tuple[int, ...]
    ram: int

    @property
    def text(self) -> str:
        sizes = [size_text(size) for size in self.gpus]
        gpus = (
            f"{len(sizes)} GPU{'s' if len(sizes) > 1 else ''} ({', '.join(dict.fromkeys(sizes))})"
            if sizes
            else "no GPU"
        )
        return f"{gpus}, {size_text(self.ram)} of RAM"


def memory_here(environment: Mapping[str, str]) -> Memory:
    """NVIDIA's GPUs, those in CUDA_VISIBLE_DEVICES where that lists numbers, and RAM, as far as this container may."""
    return Memory(_visible(_gpus(), environment.get("CUDA_VISIBLE_DEVICES")), host_memory().total_bytes)


def judge_for(
    memory: Memory, environment: Mapping[str, str] | None = None
) -> Callable[[Recipe, Quant, LocalModel | None], str]:
    """Says "unknown" where the size is. `environment`: for the flags that a plan goes by."""

    def judge(_recipe: Recipe, quant: Quant, model: LocalModel | None) -> str:
        if model is None or not model.whole:
            return "unknown" if quant.size_bytes is None else fits_text(quant.size_bytes, memory)
        return planned_text(str(model.first), memory, environment or {}) or fits_text(model.n_bytes, memory)

    return judge


def planned_text(first_shard: str, memory: Memory, environment: Mapping[str, str]) -> str:
    """Where the server would put the model, and the tokens that one request would get; empty where that does not fit,
    or cannot be planned."""
    from server.cli.build import engine_options
    from server.cli.command import read_settings
    from server.fit.choice import Device
    from server.fit.facts import read_shape
    from server.fit.placement import Box, Planner
    from server.fit.words import tokens
    from server.gguf import read_header
    from server.planning import shard_paths, wish_of

    gpus = tuple(Device(f"GPU{number}", size, size) for number, size in enumerate(memory.gpus))
    box = Box(gpus, Device("host", memory.ram, memory.ram, kind="cpu", is_cuda=False))
    try:
        shape = read_shape([read_header(path) for path in shard_paths(first_shard)])
        engine = engine_options(read_settings([], environment), first_shard)
        settled = Planner(shape, box).settle(wish_of(engine, shape, on_cuda=bool(gpus)))
    except (StartError, OSError):
        return ""
    if not settled.plan.fits:
        return ""
    if not gpus:
        where = "fits the RAM"
    elif settled.n_cpu_moe:
        where = "with experts in RAM"
    elif any(home is None for home in settled.plan.placement.blocks):
        where = "with layers in RAM"
    else:
        where = "fits the GPUs" if len(gpus) > 1 else "fits the GPU"
    return f"{where}, {tokens(settled.plan.cells.n_ctx_seq)} tokens"


def fits_text(size: int, memory: Memory) -> str:
    gpus, all_of_it = sum(memory.gpus), sum(memory.gpus) + memory.ram
    if size <= gpus * _FOR_WEIGHTS:
        return "fits the GPUs" if len(memory.gpus) > 1 else "fits the GPU"
    if size <= all_of_it * _FOR_WEIGHTS:
        return "with experts in RAM" if memory.gpus else "fits the RAM"
    return f"lacks {size_text(round(size / _FOR_WEIGHTS) - all_of_it)}"


def _gpus() -> tuple[int, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no GPU
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _visible(gpus: tuple[int, ...], listed: str | None) -> tuple[int, ...]:
    if listed is None:
        return gpus
    numbers = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.lstrip("-").isdigit() for word in numbers):
        return gpus[: len(numbers)]  # by their UUIDs: as many of them
    seen: list[int] = []
    for word in numbers:
        if int(word) not in range(len(gpus)):
            break  # CUDA ignores what stands behind a number that is none
        seen.append(gpus[int(word)])
    return tuple(seen)
