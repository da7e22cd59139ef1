"""What to say when a plan does not fit: the sum, and the changes that would make it fit, the least costly first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from server.fit.memory import DevicePlan, MemoryPlan, Part
from server.fit.placement import LEAST_UBATCH, Planner, Wish
from server.fit.words import size, tokens

N_WAYS = 3
_TOLD = (Part.MARGIN, Part.OVERHEAD)


@dataclass(frozen=True, slots=True)
class WayOut:
    """Flags that would make it fit, and what they cost."""

    flags: str
    effect: str

    def __str__(self) -> str:
        return f"{self.flags}  ({self.effect})"


def is_tight(plan: MemoryPlan) -> bool:
    """It fits, but into what should be left free."""
    return not plan.fits and all(each.needed_bytes <= each.device.free_bytes for each in (*plan.devices, plan.host))


def shortage(plan: MemoryPlan) -> str:
    """Which device lacks how much, as a sum."""
    worst = min((*plan.devices, plan.host), key=lambda each: each.room_bytes)
    return f"{worst.device.name} {needs(worst)}, {size(worst.device.free_bytes)} are free"


def needs(plan: DevicePlan) -> str:
    rows = [row for row in plan.rows if row.part is not Part.MARGIN]
    terms = " + ".join(f"{row.part.value} {size(row.n_bytes)}" for row in rows)
    return f"needs {size(plan.needed_bytes)} ({terms})"


def asked(plan: MemoryPlan) -> str:
    """The sizes that were planned, in a line."""
    choice = plan.choice
    types = choice.cache_type_k
    if choice.cache_type_v != types:
        types += f"/{choice.cache_type_v}"
    slots = "1 slot" if choice.n_slots == 1 else f"{choice.n_slots} slots"
    each = "" if choice.n_slots == 1 else f", {tokens(plan.cells.n_ctx_seq)} for one request"
    return f"{tokens(plan.cells.n_ctx)} tokens of {types} cache{each}, {slots}, ubatch {choice.n_ubatch}"


def refusal(planner: Planner, wish: Wish, plan: MemoryPlan) -> str:
    """Several lines: the numbers, then up to three ways out."""
    name = planner.shape.name or planner.shape.architecture
    weights = f"{name} has {size(planner.shape.weights_bytes)} of weights"
    lines = [f"the model does not fit: {weights}, and with {asked(plan)} {shortage(plan)}"]
    ways = ways_out(planner, wish)
    if ways:
        lines += ["  It would fit with", *(f"    {way}" for way in ways)]
    else:
        lines += [f"  {_no_way(planner)}"]
    return "\n".join(lines)


def ways_out(planner: Planner, wish: Wish) -> list[WayOut]:
    """At most three single changes, or pairs where too few of those help."""
    ways: list[WayOut] = []
    for way in _candidates(planner, wish):
        ways.append(way)
        if len(ways) == N_WAYS:
            break
    return ways


def _candidates(planner: Planner, wish: Wish) -> Iterator[WayOut]:
    choice = wish.choice
    if wish.tensor_split and planner.fits(replace(wish, tensor_split=())):
        yield WayOut("no --tensor-split", "the computed one leaves more room on the fullest GPU")
    if wish.pipeline == "on" and planner.fits(replace(wish, pipeline="off")):
        yield WayOut("--pipeline off", "long prompts are read more slowly")
    yield from _smaller_ubatch(planner, wish)
    quantised = None
    if planner.can_quantise(choice):
        quantised = replace(wish, choice=replace(choice, cache_type_k="q8_0", cache_type_v="q8_0"))
        if planner.fits(quantised):
            yield WayOut("--cache-type-k q8_0 --cache-type-v q8_0", "half the cache, nearly the same answers")
    yield from _smaller_context(planner, wish, "")
    yield from _fewer_slots(planner, wish)
    if quantised is not None and not planner.fits(quantised):
        yield from _smaller_context(planner, quantised, "--cache-type-k q8_0 --cache-type-v q8_0 ")
    experts = planner.fewest_experts(wish) if not wish.n_cpu_moe else None
    if experts is not None:
        yield WayOut(f"--n-cpu-moe {experts}", f"experts of {experts} layers in host memory; much slower")


def _smaller_ubatch(planner: Planner, wish: Wish) -> Iterator[WayOut]:
    n_ubatch = wish.choice.n_ubatch // 2
    while n_ubatch >= LEAST_UBATCH:
        if planner.fits(replace(wish, choice=replace(wish.choice, n_ubatch=n_ubatch))):
            yield WayOut(f"--ubatch-size {n_ubatch}", "long prompts are read more slowly")
            return
        n_ubatch //= 2


def _smaller_context(planner: Planner, wish: Wish, before: str) -> Iterator[WayOut]:
    n_ctx = planner.largest_context(wish, wish.least_ctx)
    if n_ctx:
        cells = replace(wish.choice, n_ctx=n_ctx).cells(planner.shape.n_ctx_train)
        yield WayOut(f"{before}--ctx-size {n_ctx}", f"{tokens(cells.n_ctx_seq)} tokens for one request")


def _fewer_slots(planner: Planner, wish: Wish) -> Iterator[WayOut]:
    """With separate caches a slot less is a cache less."""
    choice = wish.choice
    if choice.kv_unified:
        return
    each = choice.cells(planner.shape.n_ctx_train).n_ctx_seq
    for n_slots in range(choice.n_slots - 1, 0, -1):
        if planner.fits(replace(wish, choice=replace(choice, n_slots=n_slots, n_ctx=each * n_slots))):
            yield WayOut(f"--parallel {n_slots} --ctx-size {each * n_slots}", f"still {tokens(each)} for each")
            return


def _no_way(planner: Planner) -> str:
    shape, box = planner.shape, planner.box
    room = sum(device.free_bytes for device in box.devices) or box.host.free_bytes
    if shape.weights_bytes <= room:
        return (
            "No single flag helps: what is asked for beside the weights is too large. Give smaller --ctx-size, "
            "--ubatch-size and --parallel together."
        )
    into = f"{size(shape.file_bytes)} are to go into {size(room)}"
    return f"No flag helps: the weights are too large. Take a smaller quantisation: {into}."
