"""Plans against llama.cpp's own dry runs, live: a handful of cases of every kind on this machine's CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from server.errors import LoadError
from server.fit.facts import ModelShape, read_shape
from server.fit.memory import ContextChoice, Device, MemoryPlan, Part, place_on_host, plan_memory
from server.fit.probe import differences, dry_run
from server.gguf import read_header
from server.store.source import resolve_model, tiny_glm_model
from tests.fit.conftest import Shapes
from tests.support.hybrid_shape import write_hybrid_shape
from tests.support.tiny_memories import write_recurrent_gguf, write_sliding_window_gguf

HOST = Device("host", 1 << 45, 1 << 45, "cpu")
ON_CPU = {"n_gpu_layers": 0, "use_extra_bufts": False}


def plan_of(shape: ModelShape, choice: ContextChoice) -> MemoryPlan:
    return plan_memory(shape, choice, place_on_host(shape.n_blocks), HOST)


@pytest.mark.parametrize("model", ["glm-5.2", "glm-4.6", "glm-4.5-air", "glm-4.7-flash"])
def test_plans_equal_dry_runs_to_the_byte(shapes: Shapes, model: str) -> None:
    path = shapes.file(model)
    q8_0 = ContextChoice(cache_type_k="q8_0", cache_type_v="q8_0")
    choices = [
        ContextChoice(n_ctx=8192, n_slots=1),
        replace(q8_0, n_ctx=131_072, n_slots=1),
        replace(q8_0, n_ctx=100_000, n_slots=3, kv_unified=False, n_ubatch=2048, n_batch=4096),
        ContextChoice(n_ctx=262_144, n_slots=4, n_seq_max=64, n_ubatch=1024),
        ContextChoice(n_ctx=16_384, n_slots=2, flash_attn=False),
    ]
    for choice, run in zip(choices, dry_run({"path": str(path), **ON_CPU}, choices), strict=True):
        plan = plan_of(shapes.of(model), choice)
        assert run.error == ""
        assert run.exact
        assert (run.n_ctx, run.n_ctx_seq) == (plan.cells.n_ctx, plan.cells.n_ctx_seq)
        assert plan.is_exact
        assert differences(plan, run) == []


def test_the_context_that_drafts(shapes: Shapes) -> None:
    path = shapes.file("glm-5.2")
    choice = ContextChoice(
        n_ctx=131_072, n_slots=2, kv_unified=False, cache_type_k="q8_0", cache_type_v="q8_0", mtp=True
    )
    (run,) = dry_run({"path": str(path), **ON_CPU}, [choice], draft=True)
    rows = {row.part.name: row.n_bytes for row in plan_of(shapes.of("glm-5.2"), choice).host.rows}
    assert (rows["MTP_CACHE"], rows["MTP_COMPUTE"]) == (run.host([]).context, run.host([]).compute)


def test_a_hybrid_with_a_pooling_indexer_pays_for_every_sequence(tmp_path: Path) -> None:
    path = write_hybrid_shape(tmp_path / "hybrid.gguf")
    shape = read_shape([read_header(path)])
    assert shape.is_recurrent
    assert {block.kept.indexer_values for block in shape.blocks} == {0, 96}  # key, gate and pooled key
    choices = [
        ContextChoice(n_ctx=n_ctx, n_slots=n_slots, kv_unified=unified, n_ubatch=n_ubatch)
        for n_ctx in (4096, 65_536)
        for n_slots, unified in ((1, True), (2, False), (64, True))
        for n_ubatch in (64, 2048)
    ]
    runs = dry_run({"path": str(path), **ON_CPU}, choices)
    for choice, run in zip(choices, runs, strict=True):
        plan = plan_of(shape, choice)
        assert plan.host.of(Part.CACHE) == run.host([]).context
        assert run.host([]).compute <= plan.host.of(Part.COMPUTE) <= 4 * run.host([]).compute
    assert runs[-1].host([]).compute > 10 * runs[-5].host([]).compute


def test_tiny_glm_windows_and_states(tmp_path: Path) -> None:
    """Caches are exact for every kind of memory; the buffers of unknown graphs are planned with room."""
    window = write_sliding_window_gguf(tmp_path / "window.gguf")
    recurrent = write_recurrent_gguf(tmp_path / "recurrent.gguf")
    choices = [
        ContextChoice(n_ctx=4096, n_slots=2),
        ContextChoice(n_ctx=4096, n_slots=4, kv_unified=False, n_ubatch=64),
        ContextChoice(n_ctx=4096, n_slots=2, n_seq_max=8),
    ]
    for path, exact in ((tiny_glm_model(), True), (window, False), (recurrent, False)):
        shape = read_shape(resolve_model(path).headers)
        for choice, run in zip(choices, dry_run({"path": str(path), **ON_CPU}, choices), strict=True):
            plan = plan_of(shape, choice)
            told = run.host([])
            planned = {row.part.name: row.n_bytes for row in plan.host.rows}
            assert run.error == ""
            assert planned["CACHE"] == told.context
            assert plan.is_exact is exact
            if exact:
                assert planned["COMPUTE"] == told.compute
            else:
                assert told.compute <= planned["COMPUTE"] <= 6 * told.compute


def test_refusals_and_deaths_are_told(tmp_path: Path) -> None:
    path = tiny_glm_model()
    mixed = ContextChoice(n_ctx=1024, cache_type_k="f32", cache_type_v="f16")
    (run,) = dry_run({"path": str(path), **ON_CPU}, [mixed])
    assert "different K (f32) and V (f16)" in run.error
    nothing = tmp_path / "nothing.gguf"
    nothing.write_bytes(path.read_bytes()[:4096])
    with pytest.raises(LoadError, match="fetch the file again"):
        dry_run({"path": str(nothing), **ON_CPU}, [ContextChoice()])
    with pytest.raises(LoadError, match=r"died \(status 3\): oh no"):
        dry_run(
            {"path": "x"},
            [],
            command=[sys.executable, "-c", "import sys; print('oh no', file=sys.stderr); sys.exit(3)"],
        )
    with pytest.raises(LoadError, match="within 0 s"):
        dry_run({"path": "x"}, [], command=[sys.executable, "-c", "input(); input()"], timeout_s=0.01)
