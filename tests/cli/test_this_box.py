"""What fits this box, by size: the memory that there is, and what weights may take of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from server.cli.this_box import Memory, fits_text, judge_for, memory_here
from server.store.local import LocalModel
from server.store.recipes import load_recipes
from server.store.source import tiny_glm_model

GB = 10**9
BOX = Memory((80 * GB,) * 8, 1000 * GB)


@pytest.mark.parametrize(
    ("memory", "size_gb", "text"),
    [
        (BOX, 466, "fits the GPUs"),
        (BOX, 544, "fits the GPUs"),
        (BOX, 545, "with experts in RAM"),
        (BOX, 1650, "lacks 301.2 GB"),
        (Memory((24 * GB,), 256 * GB), 18, "fits the GPU"),
        (Memory((24 * GB,), 256 * GB), 236, "with experts in RAM"),
        (Memory((), 128 * GB), 68, "fits the RAM"),
        (Memory((), 64 * GB), 68, "lacks 16.0 GB"),
    ],
)
def test_the_size_decides(memory: Memory, size_gb: int, text: str) -> None:
    assert fits_text(size_gb * GB, memory) == text


def test_what_is_here_has_its_true_size() -> None:
    judge = judge_for(Memory((), 100 * GB))
    recipe = next(recipe for recipe in load_recipes() if recipe.name == "glm-5.2")
    assert judge(recipe, recipe.quants["UD-IQ4_NL"], None) == "unknown"
    here = LocalModel("o/r", "q", Path("m.gguf"), 1, 1, 50 * GB)
    assert judge(recipe, recipe.quants["UD-IQ4_NL"], here) == "fits the RAM"
    assert judge(recipe, recipe.quants["UD-Q4_K_M"], None) == "lacks 448.2 GB"


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (Memory((), 16 * GB), "fits the RAM, 1,048,576 tokens"),
        (Memory((), 2 * GB), "fits the RAM, 482,560 tokens"),
        (Memory((8 * GB,), 16 * GB), "fits the GPU, 1,048,576 tokens"),
        (Memory((8 * GB,) * 2, 16 * GB), "fits the GPUs, 1,048,576 tokens"),
        (Memory((), 1 << 20), "lacks 1.3 MB"),
    ],
)
def test_what_is_here_is_planned(memory: Memory, text: str) -> None:
    recipe = next(recipe for recipe in load_recipes() if recipe.name == "glm-5.2")
    here = LocalModel("o/r", "q", tiny_glm_model(), 3, 3, 1_980_000)
    assert judge_for(memory)(recipe, recipe.quants["UD-IQ4_NL"], here) == text


def test_what_cannot_be_read_goes_by_its_size(tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"GGUF")
    recipe = next(recipe for recipe in load_recipes() if recipe.name == "glm-5.2")
    here = LocalModel("o/r", "q", broken, 1, 1, 50 * GB)
    assert judge_for(Memory((), 100 * GB))(recipe, recipe.quants["UD-IQ4_NL"], here) == "fits the RAM"


class FakeNvml(ModuleType):
    """The library for two kinds of GPU, or without a driver, or one that fails half way."""

    class NVMLError(Exception):
        pass

    def __init__(self, sizes: list[int], fails: str = "") -> None:
        super().__init__("pynvml")
        self.sizes, self.fails = sizes, fails

    def __getattr__(self, name: str) -> Callable[..., object]:
        answers: dict[str, Callable[..., object]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.sizes),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=self.sizes[index]),
        }
        if name not in answers:
            raise AttributeError(name)
        return self._fail if name == self.fails else answers[name]

    def _fail(self, *_: object) -> object:
        raise self.NVMLError


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [
        (None, (80, 80, 24)),
        ("2,0", (24, 80)),
        ("0,-1,1", (80,)),
        ("", ()),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", (80, 80)),
        ("7", ()),
    ],
)
def test_gpus_are_those_that_may_be_seen(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([80, 80, 24]))
    assert memory_here({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}).gpus == sizes


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([80], fails))
    memory = memory_here({})
    assert memory.gpus == ()
    assert memory.text.startswith("no GPU, ")
    assert memory.ram > GB
