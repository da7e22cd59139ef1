"""Everything that `python -m server plan` tells of one model on one box, as values: the plan, how far sizes could go,
which flags to use, how fast it may be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from server.fit.advice import WayOut, ways_out
from server.fit.memory import MemoryPlan
from server.fit.placement import Planner, Settled, Wish
from server.fit.speed import Reading, Speed, reading_of, speed_of

SLOTS = (1, 2, 4, 8)
TYPES = ("f16", "q8_0")
CONTEXTS = (8192, 32768, 65536, 131072, 262144, 524288, 1048576)


@dataclass(frozen=True, slots=True)
class Reach:
    """Most tokens of one request with so many slots and that type of cache; 0: it does not fit at all."""

    cache_type: str
    n_slots: int
    n_ctx: int  # cells in all
    n_ctx_seq: int


@dataclass(frozen=True, slots=True)
class Report:
    settled: Settled
    reaches: tuple[Reach, ...]
    contexts: tuple[int, ...]  # of the grid, for one request
    ways: tuple[WayOut, ...]  # only where it does not fit
    speeds: tuple[Speed, ...]  # with an empty context and with a full one; empty: a bandwidth is unknown
    readings: tuple[Reading, ...]  # for the same two
    flags: str

    @property
    def plan(self) -> MemoryPlan:
        return self.settled.plan

    def reach(self, cache_type: str, n_slots: int) -> Reach:
        return next(each for each in self.reaches if (each.cache_type, each.n_slots) == (cache_type, n_slots))


def report(
    planner: Planner, wish: Wish, *, device_bandwidth: float | None = None, host_bandwidth: float | None = None
) -> Report:
    """`..._bandwidth`: measured bytes a second."""
    settled = planner.settle(wish)
    plan = settled.plan
    n_full = plan.cells.n_ctx_seq
    speeds = [speed_of(plan, n, device=device_bandwidth, host=host_bandwidth) for n in (0, n_full)]
    return Report(
        settled=settled,
        reaches=tuple(_reaches(planner, wish, settled)),
        contexts=tuple(n for n in CONTEXTS if n <= max(planner.shape.n_ctx_train, CONTEXTS[0])),
        ways=() if plan.fits else tuple(ways_out(planner, wish)),
        speeds=tuple(speed for speed in speeds if speed),
        readings=tuple(reading_of(plan, n) for n in (0, n_full)),
        flags=flags_for(settled),
    )


def _reaches(planner: Planner, wish: Wish, settled: Settled) -> list[Reach]:
    """With the weights and the ubatch where they were settled."""
    n_train = planner.shape.n_ctx_train
    choice = settled.plan.choice
    base = replace(wish, n_cpu_moe=settled.n_cpu_moe, n_gpu_layers=settled.n_gpu_layers or wish.n_gpu_layers)
    types = [each for each in TYPES if each == "f16" or planner.can_quantise(replace(choice, cache_type_k="f16"))]
    if choice.cache_type_k not in types:
        types.append(choice.cache_type_k)
    shared: dict[str, int] = {}
    reaches = []
    for cache_type in types:
        for n_slots in SLOTS:
            asked = replace(
                choice,
                n_ctx=n_train * (SLOTS[-1] if choice.kv_unified else n_slots),
                n_slots=n_slots,
                cache_type_k=cache_type,
                cache_type_v=cache_type,
            )
            # slots that share cells make no difference to the cells there can be
            if choice.kv_unified and cache_type in shared:
                n_ctx = shared[cache_type]
            else:
                n_ctx = shared[cache_type] = planner.largest_context(replace(base, choice=asked), roughly=64)
            n_ctx = min(n_ctx, n_train * n_slots)
            each = n_ctx // n_slots // 256 * 256
            reaches.append(Reach(cache_type, n_slots, n_ctx, min(each, n_train)))
    return reaches


def flags_for(settled: Settled) -> str:
    """The flags that make just this plan."""
    plan = settled.plan
    choice = plan.choice
    parts: list[str] = []
    devices = plan.placement.devices
    if len(devices) > 1:
        counts = ",".join(str(count) for count in settled.counts)
        parts.append(f"--split-mode layer --tensor-split {counts}")
    if devices:
        whole = settled.n_gpu_layers == plan.shape.n_blocks + 1
        parts.append(f"--n-gpu-layers {'all' if whole else settled.n_gpu_layers}")
        if settled.n_cpu_moe:
            parts.append(f"--n-cpu-moe {settled.n_cpu_moe}")
    parts.append(f"--ctx-size {plan.cells.n_ctx} --parallel {choice.n_slots}")
    if choice.kv_unified:
        parts.append("--kv-unified")
    if choice.cache_type_k != "f16" or choice.cache_type_v != "f16":
        parts.append(f"--cache-type-k {choice.cache_type_k} --cache-type-v {choice.cache_type_v}")
    if choice.n_ubatch != 512:
        parts.append(f"--batch-size {max(choice.n_batch, choice.n_ubatch)} --ubatch-size {choice.n_ubatch}")
    if len(devices) > 1 and not settled.n_cpu_moe and settled.n_gpu_layers == plan.shape.n_blocks + 1:
        parts.append(f"--pipeline {'on' if plan.placement.pipelined else 'off'}")
    return " ".join(parts)
