"""The plan before a load: what it settles, what it refuses, what it only warns of."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from server.engine.messages import DeviceInfo
from server.engine.options import EngineOptions, FitOptions, ModelOptions, TensorOverride
from server.errors import LoadError
from server.fit.machine import choose_load_mode, host_memory
from server.planning import plan_load, shard_paths
from tests.fit.conftest import Shapes

GIB = 1 << 30
CPU = DeviceInfo("CPU", "a CPU", "cpu", 1, 1)


def gpus(count: int, gib: int = 80) -> list[DeviceInfo]:
    return [DeviceInfo(f"CUDA{i}", "a GPU", "gpu", gib * GIB, gib * GIB) for i in range(count)]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Shapes:
    return Shapes(tmp_path_factory.mktemp("shapes"))


def options(shapes: Shapes, model: str = "glm-5.2", fit: FitOptions | None = None, **fields: object) -> EngineOptions:
    made = ModelOptions(str(shapes.file(model)), **fields)  # type: ignore[arg-type]
    return EngineOptions(made, fit=fit or FitOptions())


def test_layers_are_placed_and_the_rest_is_as_asked(shapes: Shapes) -> None:
    asked = options(shapes, n_ctx=131_072, cache_type_k="q8_0", cache_type_v="q8_0")
    made = plan_load(asked, [*gpus(8), CPU])
    assert made.model.tensor_split == (10.0,) * 8
    assert made.model.pipeline
    assert made.model.load_mode in ("none", "dio")
    same = msgspec.structs.replace(made.model, tensor_split=(), load_mode="auto")
    assert same == asked.model
    assert [*made.planned_bytes] == [*(f"CUDA{i}" for i in range(8)), "host"]
    assert made.planned_bytes["CUDA1"] > 57 * GIB
    assert made.warnings == []
    assert "blocks 10,10,10,10,10,10,10,10 on 8 devices" in made.lines[1]
    assert made.lines[2].startswith("plan: pipeline on; with it off CUDA")


def test_what_gives_way_is_told(shapes: Shapes) -> None:
    made = plan_load(options(shapes, "glm-4.5-air"), [*gpus(1), CPU])
    assert made.model.cache_type_k == "q8_0"
    assert 4096 <= made.model.n_ctx < 131_072
    assert any("--ctx-size as trained -> " in warning for warning in made.warnings)


def test_sizes_set_by_hand_are_refused_and_not_changed(shapes: Shapes) -> None:
    fit = FitOptions(given=("n_ctx", "n_slots", "n_ubatch", "cache_type_k"))
    asked = options(shapes, fit=fit, n_ctx=4 << 20, n_slots=4, kv_unified=False)
    with pytest.raises(LoadError, match="the model does not fit") as caught:
        plan_load(asked, [*gpus(8), CPU])
    lines = caught.value.message.splitlines()
    assert len(lines) == 5
    assert lines[1] == "  It would fit with"
    off = msgspec.structs.replace(asked, fit=msgspec.structs.replace(fit, adapts=False))
    made = plan_load(off, [*gpus(8), CPU])
    assert "--fit off" in made.warnings[0]
    assert made.model.n_ctx == 4 << 20


def test_less_than_the_margin_is_a_warning(shapes: Shapes) -> None:
    fit = FitOptions(margin_bytes=(25 * GIB,), given=("n_ctx", "n_slots", "n_ubatch", "cache_type_k"))
    made = plan_load(options(shapes, fit=fit, n_ctx=8192), [*gpus(8), CPU])
    assert made.warnings[0].startswith("memory is tight: ")
    apart = FitOptions(margin_bytes=(GIB, GIB, 60 * GIB, GIB, GIB, GIB, GIB, GIB))
    counts = plan_load(options(shapes, fit=apart, n_ctx=8192), [*gpus(8), CPU]).model.tensor_split
    assert counts[2] < 5 < counts[3]


def test_experts_go_where_they_are_sent(shapes: Shapes) -> None:
    sent = options(shapes, "glm-4.7-flash", tensor_overrides=(TensorOverride("exps", "CPU"),), n_ctx=8192)
    by_hand = options(shapes, "glm-4.7-flash", cpu_moe=True, n_ctx=8192)
    for asked in (sent, by_hand):
        made = plan_load(asked, [*gpus(1, 12), CPU])
        assert made.planned_bytes["CUDA0"] < 8 * GIB
        assert (made.model.cpu_moe, made.model.tensor_overrides) == (asked.model.cpu_moe, asked.model.tensor_overrides)


def test_split_mode_tensor_is_not_planned(shapes: Shapes) -> None:
    asked = options(shapes, split_mode="tensor")
    made = plan_load(asked, gpus(2))
    assert (made.model, made.planned_bytes) == (asked.model, {})
    assert "no plan" in made.lines[0]


def test_shards_are_named_by_number() -> None:
    assert shard_paths("/m/a-00002-of-00003.gguf") == [f"/m/a-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert shard_paths("/m/a.gguf") == ["/m/a.gguf"]


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_containers_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\n")
    bare = host_memory(tmp_path, tmp_path / "nowhere")
    assert (bare.total_bytes, bare.free_bytes) == (1000 << 10, 800 << 10)
    (tmp_path / "memory.max").write_text(str(600 << 10))
    (tmp_path / "memory.current").write_text(str(500 << 10))
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {100 << 10}\nactive_file {50 << 10}\n")
    inside = host_memory(tmp_path, tmp_path)
    assert (inside.total_bytes, inside.free_bytes) == (600 << 10, 250 << 10)
    (tmp_path / "memory.max").write_text("max")
    assert host_memory(tmp_path, tmp_path).free_bytes == 800 << 10


def test_the_load_mode_follows_the_weights(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"0" * 8192)
    paths = [str(file)]
    assert choose_load_mode(paths, on_gpus=0, on_host=10, available=100)[0] == "mmap"
    assert choose_load_mode(paths, on_gpus=9, on_host=10, available=1)[0] == "mmap"
    assert choose_load_mode(paths, on_gpus=50, on_host=10, available=100)[0] == "none"
    assert choose_load_mode(paths, on_gpus=50, on_host=40, available=100)[0] in ("dio", "none")
    assert choose_load_mode([str(tmp_path / "gone")], on_gpus=500, on_host=0, available=100)[0] == "none"
