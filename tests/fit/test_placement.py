"""Placements of GLM-5.2 and smaller models on boxes: what fits, what gives way, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.fit.advice import is_tight, refusal, ways_out
from server.fit.choice import ContextChoice, Device
from server.fit.placement import Box, Planner, Wish
from server.fit.probe import dry_run
from tests.fit.conftest import Shapes

GIB = 1 << 30
HOST = Device("host", 1024 * GIB, 1024 * GIB, "cpu")
ALL_GIVEN = frozenset({"n_ctx", "n_slots", "n_ubatch", "cache_type"})


def gpus(count: int, gib: float = 80) -> tuple[Device, ...]:
    return tuple(Device(f"CUDA{index}", int(gib * GIB), int(gib * GIB)) for index in range(count))


EIGHT = Box(gpus(8), HOST)


def operators_choice(n_ubatch: int) -> ContextChoice:
    """Of the box that planning.md's figures are of: 131,072 tokens, two slots, q8_0."""
    return ContextChoice(
        n_ctx=131_072,
        n_slots=2,
        kv_unified=False,
        n_batch=8192,
        n_ubatch=n_ubatch,
        cache_type_k="q8_0",
        cache_type_v="q8_0",
    )


@pytest.mark.parametrize(("n_ubatch", "pipelined", "plain"), [(8192, 72.9, 65.8), (512, 58.9, 58.5)])
def test_both_rows_are_planned_and_ten_blocks_go_to_each_gpu(
    shapes: Shapes, n_ubatch: int, pipelined: float, plain: float
) -> None:
    settled = Planner(shapes.of("glm-5.2"), EIGHT).settle(Wish(operators_choice(n_ubatch), ALL_GIVEN))
    assert settled.plan.fits
    assert settled.plan.placement.pipelined
    assert settled.other is not None
    assert settled.plan.fullest.needed_bytes / GIB == pytest.approx(pipelined, abs=0.2)
    assert settled.other.fullest.needed_bytes / GIB == pytest.approx(plain, abs=0.2)
    assert settled.counts == (10,) * 8
    assert settled.changes == ()


def test_pipelining_is_left_out_where_it_does_not_fit(shapes: Shapes) -> None:
    box = Box(gpus(8, 72), HOST)
    planner = Planner(shapes.of("glm-5.2"), box)
    wish = Wish(operators_choice(8192), ALL_GIVEN)
    settled = planner.settle(wish)
    assert (settled.plan.fits, settled.plan.placement.pipelined) == (True, False)
    assert settled.other is not None
    assert not settled.other.fits
    forced = planner.settle(replace(wish, pipeline="on"))
    assert not forced.plan.fits
    assert "--pipeline off" in str(ways_out(planner, replace(wish, pipeline="on"))[0])


def test_four_times_a_million_tokens_are_refused_with_the_sum_and_the_nearest_that_fits(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-5.2"), EIGHT)
    wish = Wish(ContextChoice(n_ctx=4 << 20, n_slots=4, kv_unified=False), ALL_GIVEN)
    settled = planner.settle(wish)
    assert not settled.plan.fits
    text = refusal(planner, wish, settled.plan)
    first, *others = text.splitlines()
    assert "CUDA1 needs 109.3 GiB (weights 56.5 GiB + cache 48.0 GiB + compute buffer" in first
    assert "80.0 GiB are free" in first
    ways = [line.strip() for line in others[1:]]
    assert len(ways) == 3
    context = next(way for way in ways if way.startswith("--ctx-size"))
    n_ctx = int(context.split()[1])
    assert planner.fits(replace(wish, choice=replace(wish.choice, n_ctx=n_ctx)))
    assert not planner.fits(replace(wish, choice=replace(wish.choice, n_ctx=n_ctx + 4 * 1024)))
    assert any(way.startswith("--parallel 1 --ctx-size 1048576 ") for way in ways)


def test_sizes_that_nobody_asked_for_give_way_in_order(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-4.5-air"), Box(gpus(1), HOST))
    settled = planner.settle(Wish(ContextChoice(n_ubatch=2048)))
    assert settled.plan.fits
    assert [change.what for change in settled.changes] == [
        "--ubatch-size",
        "--cache-type-k and --cache-type-v",
        "--ctx-size",
    ]
    small = planner.settle(Wish(ContextChoice(n_ctx=24576), frozenset({"n_ctx", "n_ubatch"})))
    assert [str(change) for change in small.changes] == ["--cache-type-k and --cache-type-v f16 -> q8_0"]
    fixed = planner.settle(Wish(ContextChoice(n_ubatch=2048), frozenset({"n_ubatch", "cache_type"})))
    assert [change.what for change in fixed.changes] == ["--ctx-size"]
    assert fixed.plan.fits
    assert fixed.plan.cells.n_ctx > 16384


def test_experts_go_to_the_host_when_the_weights_are_too_large_for_the_gpus(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-4.5-air"), Box(gpus(1, 24), HOST))
    wish = Wish(ContextChoice(n_ctx=32768), frozenset({"n_ctx"}))
    settled = planner.settle(wish)
    assert settled.plan.fits
    assert 0 < settled.n_cpu_moe <= 46
    assert settled.n_gpu_layers == planner.shape.n_blocks + 1
    fewer = planner.lay_out(replace(wish, choice=settled.plan.choice), n_cpu_moe=settled.n_cpu_moe - 1)
    assert not fewer.fits
    only = planner.settle(replace(wish, n_cpu_moe=0))
    assert only.n_cpu_moe == 0
    assert 0 < only.n_gpu_layers < 40


def test_a_host_that_cannot_hold_what_stays_there_is_no_fit(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-4.5-air"), Box(gpus(1, 24), Device("host", 32 * GIB, 32 * GIB, "cpu")))
    settled = planner.settle(Wish(ContextChoice(n_ctx=32768), frozenset({"n_ctx"})))
    assert not settled.plan.fits
    assert "No flag helps: the weights are too large" in refusal(
        planner, Wish(ContextChoice(n_ctx=32768)), settled.plan
    )
    cpu = Planner(shapes.of("glm-4.5-air"), Box((), Device("host", 64 * GIB, 64 * GIB, "cpu")))
    assert not cpu.settle(Wish(ContextChoice(n_ctx=4096))).plan.fits


def test_the_weights_are_not_blamed_where_the_sizes_are_too_large(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-4.5-air"), Box((), Device("host", 200 * GIB, 200 * GIB, "cpu")))
    wish = Wish(ContextChoice(n_ctx=1 << 22, n_ubatch=4096, n_batch=4096), ALL_GIVEN)
    for least_ctx in (4096, 1 << 22):
        said = refusal(planner, replace(wish, least_ctx=least_ctx), planner.settle(wish).plan)
        assert ("No single flag helps: what is asked for" in said) == (least_ctx > 4096)
        assert "weights are too large" not in said


def test_what_is_within_the_margin_is_tight(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-5.2"), Box(gpus(8, 59.3), HOST))
    settled = planner.settle(Wish(operators_choice(512), ALL_GIVEN))
    assert not settled.plan.fits
    assert is_tight(settled.plan)


def test_one_device_and_shares_by_hand(shapes: Shapes) -> None:
    planner = Planner(shapes.of("glm-4.7-flash"), Box(gpus(3), HOST))
    wish = Wish(ContextChoice(n_ctx=8192), frozenset({"n_ctx"}), split_mode="none", main_gpu=2)
    settled = planner.settle(wish)
    assert [each.device.name for each in settled.plan.devices] == ["CUDA2"]
    assert not settled.plan.placement.pipelined
    shared = planner.settle(replace(wish, split_mode="layer", tensor_split=(20, 20, 8)))
    assert shared.counts == (20, 20, 8)


@settings(max_examples=15)
@given(st.lists(st.floats(4, 90), min_size=1, max_size=3), st.data())
def test_more_memory_never_makes_a_plan_worse(shapes: Shapes, sizes: list[float], data: st.DataObject) -> None:
    def settle(gib: list[float]) -> tuple[bool, int, int, int]:
        devices = tuple(Device(f"CUDA{index}", int(each * GIB), int(each * GIB)) for index, each in enumerate(gib))
        settled = Planner(shapes.of("glm-4.7-flash"), Box(devices, HOST)).settle(Wish(ContextChoice()))
        plan = settled.plan
        return plan.fits, settled.n_gpu_layers, -settled.n_cpu_moe, plan.cells.n_ctx if settled.n_gpu_layers else 0

    more = [each + data.draw(st.floats(0, 30)) for each in sizes]
    fits, on_gpus, experts, n_ctx = settle(sizes)
    fits_more, on_gpus_more, experts_more, n_ctx_more = settle(more)
    assert fits_more >= fits
    assert on_gpus_more >= on_gpus
    if on_gpus_more == on_gpus:
        assert experts_more >= experts or n_ctx_more > n_ctx
        assert n_ctx_more >= n_ctx - 1024 or experts_more > experts


@settings(max_examples=15)
@given(st.sampled_from([4096, 65536, 202752]), st.integers(1, 4), st.booleans(), st.sampled_from([256, 2048]))
def test_rows_add_up_to_the_totals(shapes: Shapes, n_ctx: int, n_slots: int, unified: bool, n_ubatch: int) -> None:
    choice = ContextChoice(n_ctx=n_ctx, n_slots=n_slots, kv_unified=unified, n_ubatch=n_ubatch)
    plan = Planner(shapes.of("glm-4.7-flash"), Box(gpus(2, 30), HOST)).settle(Wish(choice, ALL_GIVEN)).plan
    for each in (*plan.devices, plan.host):
        assert each.total_bytes == sum(row.n_bytes for row in each.rows)
        assert each.fits == (each.total_bytes <= each.device.free_bytes)
    assert plan.fits == all(each.fits for each in (*plan.devices, plan.host))


@settings(max_examples=4)
@given(st.integers(2, 14), st.sampled_from([1, 4]), st.booleans())
def test_what_fits_by_the_plan_fits_by_the_dry_run(shapes: Shapes, gib: int, n_slots: int, unified: bool) -> None:
    box = Box((), Device("host", (34 + gib) * GIB, (34 + gib) * GIB, "cpu"))
    choice = ContextChoice(n_slots=n_slots, kv_unified=unified)
    plan = Planner(shapes.of("glm-4.7-flash"), box).settle(Wish(choice)).plan
    (run,) = dry_run({"path": str(shapes.file("glm-4.7-flash"))}, [plan.choice])
    told = run.host([])
    assert run.n_ctx == plan.cells.n_ctx
    if plan.fits:
        assert told.model + told.context + told.compute <= box.host.free_bytes
