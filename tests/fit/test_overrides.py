"""--override-tensor in plans."""

from __future__ import annotations

from server.fit.choice import ContextChoice, Device
from server.fit.memory import MemoryPlan, Part
from server.fit.overrides import moves_of
from server.fit.placement import Box, Planner, Wish
from tests.fit.conftest import Shapes

GIB = 1 << 30
BOX = Box(
    tuple(Device(f"CUDA{index}", 80 * GIB, 80 * GIB) for index in range(2)),
    Device("host", 512 * GIB, 512 * GIB, "cpu"),
)
NOTHING_GIVES_WAY = frozenset({"n_ctx", "n_slots", "n_ubatch", "cache_type"})


def planned(shapes: Shapes, *overrides: tuple[str, str], n_cpu_moe: int = 0) -> MemoryPlan:
    choice = ContextChoice(n_ctx=8192)
    wish = Wish(choice, NOTHING_GIVES_WAY, overrides=overrides, n_cpu_moe=n_cpu_moe, pipeline="off")
    return Planner(shapes.of("glm-4.7-flash"), BOX).settle(wish).plan


def weights(plan: MemoryPlan) -> list[int]:
    return [each.of(Part.WEIGHTS) for each in (*plan.devices, plan.host)]


def test_all_experts_of_a_block_are_as_with_n_cpu_moe(shapes: Shapes) -> None:
    by_pattern = planned(shapes, (r"blk\.[0-5]\.ffn_.*_exps", "CPU"))
    by_number = planned(shapes, n_cpu_moe=6)
    assert weights(by_pattern) == weights(by_number)
    assert by_pattern.placement == by_number.placement


def test_single_tensors_move_between_devices_and_to_the_host(shapes: Shapes) -> None:
    shape = shapes.of("glm-4.7-flash")
    plain = planned(shapes)
    size = shape.blocks[1].tensors["ffn_down_exps.weight"]
    to_host = planned(shapes, (r"blk\.1\.ffn_down_exps", "CPU"))
    assert sum(weights(to_host)) == sum(weights(plain))
    assert weights(to_host)[2] - weights(plain)[2] == size
    to_other = planned(shapes, (r"blk\.1\.ffn_down_exps", "CUDA1"), (".*", "CUDA0"))
    assert weights(to_other)[1] == size + (shape.output_bytes if to_other.placement.output == 1 else 0)
    assert weights(to_other)[2] == weights(plain)[2]
    assert "--override-tensor" in to_other.devices[1].rows[0].why


def test_the_first_pattern_that_matches_counts(shapes: Shapes) -> None:
    shape = shapes.of("glm-4.7-flash")
    moves = moves_of(shape, [("ffn_up_exps", "CUDA1"), ("exps", "CPU")], ["CUDA0", "CUDA1"])
    assert moves.experts == frozenset()
    assert {move.to for move in moves.others} == {"CUDA1", "CPU"}
    assert moves_of(shape, [], []) == moves_of(shape, [("no such tensor", "CPU")], [])
