"""The sums, against the figures that llama.cpp's own dry runs gave."""

from __future__ import annotations

import pytest

from server.fit.cells import bytes_per_token, cache_bytes, row_bytes
from server.fit.memory import ContextChoice, Device, Part, Reserves, place_by_counts, place_on_host, plan_memory
from tests.fit.conftest import Shapes

GIB = 1 << 30
EIGHT = tuple(Device(f"CUDA{index}", 80 * GIB, 80 * GIB) for index in range(8))
HOST = Device("host", 1024 * GIB, 1000 * GIB, "cpu")


@pytest.mark.parametrize(
    ("model", "f16", "q8_0"),
    [
        ("glm-5.2", 95_232, 50_592),
        ("glm-5.1", 109_824, 58_344),
        ("glm-4.6", 376_832, 200_192),
        ("glm-4.5-air", 188_416, 100_096),
        ("glm-4.7-flash", 54_144, 28_764),
    ],
)
def test_bytes_of_a_token_in_the_cache(shapes: Shapes, model: str, f16: int, q8_0: int) -> None:
    shape = shapes.of(model)
    assert bytes_per_token(shape, "f16", "f16") == f16
    assert bytes_per_token(shape, "q8_0", "q8_0") == q8_0


def test_glm_5_2_has_the_published_number_of_parameters_and_the_known_sizes(shapes: Shapes) -> None:
    shape = shapes.of("glm-5.2")
    assert shape.n_params == 753_864_132_864
    assert shape.file_bytes / GIB == pytest.approx(433.78, abs=0.01)
    assert [round(block.weights.total / GIB, 2) for block in shape.blocks[2:7]] == [0.4, 6.05, 6.05, 6.05, 5.65]
    assert shape.token_embd_bytes / GIB == pytest.approx(0.94, abs=0.005)
    assert len([block for block in shape.trunk if block.kept.indexer_values]) == 21


@pytest.mark.parametrize(
    ("n_ctx", "n_slots", "unified", "told"),
    [
        (10_000, 3, False, (10_752, 3_584)),
        (10_000, 3, True, (10_240, 10_240)),
        (100_000, 3, False, (100_608, 33_536)),
        (131_072, 2, False, (131_072, 65_536)),
    ],
)
def test_cells_are_rounded_as_llama_cpp_does(n_ctx: int, n_slots: int, unified: bool, told: tuple[int, int]) -> None:
    cells = ContextChoice(n_ctx=n_ctx, n_slots=n_slots, kv_unified=unified).cells(1 << 20)
    assert (cells.n_ctx, cells.n_ctx_seq) == told


@pytest.mark.parametrize(
    ("n_ubatch", "pipelined", "gib"), [(8192, True, 72.9), (8192, False, 65.8), (512, True, 58.9), (512, False, 58.5)]
)
def test_the_fullest_of_eight_gpus(shapes: Shapes, n_ubatch: int, pipelined: bool, gib: float) -> None:
    """llama.cpp's dry run says 73.6 for the first: it counts 0.75 GiB that a load does not take (compute_bytes)."""
    choice = ContextChoice(
        n_ctx=131_072,
        n_slots=2,
        kv_unified=False,
        n_batch=8192,
        n_ubatch=n_ubatch,
        cache_type_k="q8_0",
        cache_type_v="q8_0",
    )
    placement = place_by_counts(EIGHT, [10] * 8, 79, pipelined=pipelined)
    plan = plan_memory(shapes.of("glm-5.2"), choice, placement, HOST)
    assert plan.fullest.needed_bytes / GIB == pytest.approx(gib, abs=0.05)
    assert plan.fits
    weights = [device.of(Part.WEIGHTS) / GIB for device in plan.devices]
    assert weights == pytest.approx([41.96, *[56.53] * 6, 45.95], abs=0.01)


def test_rows_add_up_and_experts_on_the_host_leave_their_device(shapes: Shapes) -> None:
    shape = shapes.of("glm-5.2")
    choice = ContextChoice(n_ctx=65_536, mtp=True, cache_ram_bytes=8 * GIB)
    whole = plan_memory(shape, choice, place_by_counts(EIGHT, [10] * 8, 79), HOST)
    apart = frozenset(range(3, 79))
    spread = plan_memory(shape, choice, place_by_counts(EIGHT, [10] * 8, 79, experts_on_host=apart), HOST)
    for plan in (whole, spread):
        for each in (*plan.devices, plan.host):
            assert each.total_bytes == sum(row.n_bytes for row in each.rows)
            assert each.total_bytes - each.needed_bytes == GIB
            assert all(row.why for row in each.rows)
        loaded = sum(each.of(Part.WEIGHTS) + each.of(Part.MTP_WEIGHTS) for each in (*plan.devices, plan.host))
        assert loaded == shape.weights_bytes + shape.nextn[0].weights.total
    assert spread.host.of(Part.WEIGHTS) / GIB > 400
    assert whole.host.of(Part.HOST_CACHE) == 8 * GIB
    assert whole.devices[7].of(Part.MTP_WEIGHTS) / GIB == pytest.approx(5.73, abs=0.01)
    assert [device.of(Part.MTP_CACHE) for device in whole.devices[:7]] == [0] * 7
    # CUDA 0 fetches the experts of a prompt's tokens itself
    assert spread.devices[0].of(Part.COMPUTE) > 3 * GIB > whole.devices[0].of(Part.COMPUTE)


def test_a_model_on_the_cpu_puts_all_on_the_host(shapes: Shapes) -> None:
    shape = shapes.of("glm-4.7-flash")
    plan = plan_memory(shape, ContextChoice(n_ctx=8192), place_on_host(shape.n_blocks), HOST, reserves=Reserves())
    assert plan.devices == ()
    assert plan.fullest is plan.host
    assert plan.host.of(Part.WEIGHTS) == shape.weights_bytes
    assert plan.host.of(Part.CACHE) == 8192 * 54_144


def test_a_type_that_does_not_divide_a_row_is_named() -> None:
    with pytest.raises(ValueError, match="80 values cannot be q8_0"):
        row_bytes("q8_0", 80)


def test_more_cells_slots_or_tokens_never_take_less(shapes: Shapes) -> None:
    shape = shapes.of("glm-4.6")
    block = shape.blocks[5]
    sizes = [
        cache_bytes(shape, block, choice, choice.cells(shape.n_ctx_train))
        for choice in (ContextChoice(n_ctx=n_ctx) for n_ctx in range(256, 8192, 250))
    ]
    assert sizes == sorted(sizes)
