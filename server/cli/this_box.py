"""Whether a model fits this box, roughly: by the size of its files and the memory there is. A plan made of the model's
header is exact; this says what is worth fetching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.cli.tables import size_text
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


def judge_for(memory: Memory) -> Callable[[Recipe, Quant, LocalModel | None], str]:
    """Says "unknown" where the size is."""

    def judge(_recipe: Recipe, quant: Quant, model: LocalModel | None) -> str:
        size = model.n_bytes if model and model.whole else quant.size_bytes
        return "unknown" if size is None else fits_text(size, memory)

    return judge


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
