"""Plans against 126 dry runs on one and eight devices that plan like CUDA's (scripts/measure_dry_runs.py)."""

from __future__ import annotations

from functools import partial

import pytest

from server.fit.compute import compute_bytes
from server.fit.memory import MemoryPlan, Part, plan_memory
from tests.fit.conftest import Shapes
from tests.fit.test_memory import HOST
from tests.support.dry_runs import Case, read_table

GIB = 1 << 30
SHARE_OFF = 1e-5


as_a_dry_run = partial(compute_bytes, dry=True)


def planned(plan: MemoryPlan, draft: bool) -> tuple[int, list[int]]:
    cache, compute = (Part.MTP_CACHE, Part.MTP_COMPUTE) if draft else (Part.CACHE, Part.COMPUTE)
    places = (*plan.devices, plan.host)
    return sum(each.of(cache) for each in places), [each.of(compute) for each in places]


def test_caches_are_exact_and_buffers_nearly_always(shapes: Shapes) -> None:
    cases = read_table()
    assert len(cases) > 120
    n_exact = 0
    for case in cases:
        plan = plan_memory(shapes.of(case.model), case.choice(), case.placement(), HOST, compute=as_a_dry_run)
        cache, compute = planned(plan, case.draft)
        assert cache == case.cache, case
        assert len(compute) == len(case.compute)
        for mine, told in zip(compute, case.compute, strict=True):
            assert abs(mine - told) <= SHARE_OFF * told, case
        n_exact += compute == list(case.compute)
    assert n_exact > 0.9 * len(cases), n_exact


@pytest.mark.parametrize(
    ("n_ctx", "n_ubatch", "gib"),
    [
        (8192, 512, 0.53),
        (8192, 8192, 8.5),
        (131_072, 2048, 4.1),
        (131_072, 512, 1.02),
        (131_072, 8192, 16.3),
        (1_048_576, 512, 4.5),
        (1_048_576, 8192, 72.3),
    ],
)
def test_known_buffers_of_one_device(n_ctx: int, n_ubatch: int, gib: float) -> None:
    """The figures that people plan with, and the table itself says them: GLM-5.2, f16, one sequence."""
    (case,) = of_glm_5_2(n_ctx=n_ctx, n_ubatch=n_ubatch, n_slots=1, cache_type="f16", unified=True, counts=(80,))
    assert case.compute[0] / GIB == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(
    ("n_ctx", "n_ubatch", "n_slots", "pipelined", "gib", "host"),
    [
        (131_072, 512, 2, True, 1.13, 0.56),
        (131_072, 512, 2, False, 0.64, 0.15),
        (131_072, 8192, 2, True, 15.8, 8.9),
        (131_072, 8192, 2, False, 7.9, 2.4),
        (131_072, 8192, 1, True, 25.8, 16.9),
        (131_072, 8192, 1, False, 12.0, 4.4),
        (1_048_576, 512, 1, True, 11.6, 8.1),
        (1_048_576, 512, 1, False, 5.4, 2.0),
    ],
)
def test_known_buffers_of_eight_devices(
    n_ctx: int, n_ubatch: int, n_slots: int, pipelined: bool, gib: float, host: float
) -> None:
    (case,) = of_glm_5_2(
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        n_slots=n_slots,
        pipelined=pipelined,
        cache_type="q8_0",
        counts=(10,) * 8,
        draft=False,
        n_apart=0,
    )
    assert max(case.compute[:-1]) / GIB == pytest.approx(gib, rel=0.02)
    assert case.compute[-1] / GIB == pytest.approx(host, rel=0.05)


def of_glm_5_2(**fields: object) -> list[Case]:
    return [
        case
        for case in read_table()
        if case.model == "glm-5.2" and all(getattr(case, name) == value for name, value in fields.items())
    ]
