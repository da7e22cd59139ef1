"""Where a model's parts go, and what gives way when there is too little memory.

`Planner.lay_out` puts one choice of sizes on the devices as well as it can; `Planner.settle` finds the choice. What
gives way, and in which order, is `_ladder` and `_search`; nothing that was asked for by hand does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from server.fit.cells import cache_bytes
from server.fit.choice import ContextChoice, Device, Placement, place_by_counts, place_on_host
from server.fit.facts import ModelShape
from server.fit.memory import MemoryPlan, Part, Reserves, plan_memory
from server.fit.overrides import Moves, moved, moves_of
from server.fit.split import best_split, counts_of, device_of_blocks

LEAST_UBATCH = 256
CELLS = 256  # contexts are multiples of it
_QUANTISED = "q8_0"
UNQUANTISED = frozenset({"f32", "f16", "bf16"})
_ROW = 32  # values in a block of a quantised row


@dataclass(frozen=True, slots=True)
class Box:
    """The memory there is. `devices` in llama.cpp's order; the host as a device of its own."""

    devices: tuple[Device, ...]
    host: Device


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. `given` names what was asked for by hand and stays: n_ctx, n_slots, n_ubatch, cache_type."""

    choice: ContextChoice
    given: frozenset[str] = frozenset()
    n_gpu_layers: int | None = None  # None: as many as fit; negative: all
    split_mode: str = "layer"  # none, layer
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    n_cpu_moe: int | None = None  # None: as few as need be
    pipeline: str = "auto"  # auto, on, off
    overrides: tuple[tuple[str, str], ...] = ()  # (regular expression for tensors, buffer type)
    adapts: bool = True
    least_ctx: int = 4096
    reserves: Reserves | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One size that gave way."""

    what: str  # the flag, mostly
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Settled:
    """`plan.fits` says whether it worked out. `other` is the same with pipelining the other way, where there is one."""

    plan: MemoryPlan
    changes: tuple[Change, ...]
    n_cpu_moe: int = 0
    other: MemoryPlan | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks on each device, the output as one more."""
        placement = self.plan.placement
        return counts_of([*placement.blocks, placement.output], len(placement.devices))

    @property
    def n_gpu_layers(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class _Try:
    """One state of the search."""

    choice: ContextChoice
    n_cpu_moe: int
    n_on_host: int


class Planner:
    """Lays one model out on one box, and remembers what it laid out."""

    def __init__(self, shape: ModelShape, box: Box) -> None:
        self.shape = shape
        self.box = box
        self._plans: dict[tuple[Wish, _Try, bool], MemoryPlan] = {}
        self._moves_of: dict[tuple[tuple[str, str], ...], Moves] = {}

    # ── one layout ───────────────────────────────────────────────────────────────────────────────────────────────────

    def lay_out(self, wish: Wish, *, n_cpu_moe: int = 0, n_on_host: int = 0, pipelined: bool = False) -> MemoryPlan:
        """`n_on_host` blocks, the first ones, stay on the host, and the experts of the first `n_cpu_moe`."""
        devices = self._devices(wish)
        n_blocks = self.shape.n_blocks
        if not devices or n_on_host > n_blocks:
            return self._sum(wish, place_on_host(n_blocks))
        moves = self._moves(wish)
        experts = moves.experts | {
            block.index for block in self.shape.trunk if block.index < n_cpu_moe and block.weights.experts
        }

        def place(counts: tuple[int, ...]) -> Placement:
            return place_by_counts(
                devices, counts, n_blocks, n_on_host=n_on_host, experts_on_host=experts, pipelined=pipelined
            )

        n_places = n_blocks + 1 - n_on_host
        if wish.tensor_split:
            shares = [*wish.tensor_split, *([0.0] * len(devices))][: len(devices)]
            homes = device_of_blocks(n_places, shares if any(shares) else [1.0] * len(devices))
            return self._sum(wish, place(counts_of(homes, len(devices))))
        if len(devices) == 1:
            return self._sum(wish, place((n_places,)))
        even = best_split([1] * n_places, [n_places] * len(devices))
        trial = self._sum(wish, place(even))
        room = [
            plan.device.free_bytes - (plan.total_bytes - plan.of(Part.WEIGHTS) - plan.of(Part.CACHE))
            for plan in trial.devices
        ]
        counts = best_split(self._loads(wish, experts)[n_on_host:], room, [device.free_bytes for device in devices])
        if counts == even:
            return trial
        # buffers depend on where the cuts are, so what was computed with others is tried
        other = self._sum(wish, place(counts))
        gain = other.fullest.room_bytes - trial.fullest.room_bytes
        return other if gain > trial.fullest.needed_bytes // 200 or (other.fits and not trial.fits) else trial

    def _sum(self, wish: Wish, placement: Placement) -> MemoryPlan:
        plan = plan_memory(self.shape, wish.choice, placement, self.box.host, reserves=wish.reserves)
        return moved(plan, self._moves(wish))

    def _moves(self, wish: Wish) -> Moves:
        if wish.overrides not in self._moves_of:
            names = [device.name for device in self.box.devices]
            self._moves_of[wish.overrides] = moves_of(self.shape, wish.overrides, names)
        return self._moves_of[wish.overrides]

    def _devices(self, wish: Wish) -> tuple[Device, ...]:
        if wish.split_mode == "none" and self.box.devices:
            return (self.box.devices[min(wish.main_gpu, len(self.box.devices) - 1)],)
        return self.box.devices

    def _loads(self, wish: Wish, experts: frozenset[int]) -> list[int]:
        """Bytes of each block on its device, and of the output."""
        shape, choice = self.shape, wish.choice
        gone: dict[int, int] = {}
        for move in self._moves(wish).others:
            gone[move.block] = gone.get(move.block, 0) + move.n_bytes
        cells = choice.cells(shape.n_ctx_train)
        loads = []
        for block in shape.blocks:
            load = 0
            if not block.is_nextn or choice.mtp:
                load = block.weights.total - (block.weights.experts if block.index in experts else 0)
                load -= gone.get(block.index, 0)
                if choice.offload_kqv:
                    load += cache_bytes(shape, block, choice, cells)
            loads.append(load)
        return [*loads, shape.output_bytes]

    # ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, wish: Wish) -> Settled:
        """The wish itself when it fits, else with what may give way given way; the wish's own plan when nothing
        helps."""
        start = _Try(wish.choice, wish.n_cpu_moe or 0, self._asked_on_host(wish))
        found = start
        if wish.adapts and not self._fits(wish, start):
            found = self._search(wish, start) or start
        pipelined = self._plan(wish, found, True) if self._may_pipeline(wish, found) else None
        plain = None if wish.pipeline == "on" and pipelined else self._plan(wish, found, False)
        plan = pipelined if pipelined and (pipelined.fits or plain is None) else plain
        assert plan is not None
        n_cpu_moe = min(found.n_cpu_moe, self._n_expert_blocks())
        return Settled(plan, tuple(_changes(start, found)), n_cpu_moe, plain if plan is pipelined else pipelined)

    def largest_context(self, wish: Wish, least: int = CELLS, roughly: int = 0) -> int:
        """Most cells in all that fit with the rest of the wish as it is, weights where they were asked for; 0: none."""
        state = _Try(wish.choice, wish.n_cpu_moe or 0, self._asked_on_host(wish))
        found = self._widest(wish, state, least, roughly)
        return found.choice.cells(self.shape.n_ctx_train).n_ctx if found else 0

    def fits(self, wish: Wish) -> bool:
        """Whether the wish fits as it is."""
        return self._fits(wish, _Try(wish.choice, wish.n_cpu_moe or 0, self._asked_on_host(wish)))

    def fewest_experts(self, wish: Wish) -> int | None:
        """The least --n-cpu-moe with which the wish fits as it is; None: with none."""
        n_all = self._n_expert_blocks()
        state = _Try(wish.choice, n_all, self._asked_on_host(wish))
        if not n_all or not self._devices(wish) or not self._fits(wish, state):
            return None
        return self._with_fewest_experts(wish, state).n_cpu_moe

    def _asked_on_host(self, wish: Wish) -> int:
        n_places = self.shape.n_blocks + 1
        if not self._devices(wish):
            return n_places
        asked = wish.n_gpu_layers
        return 0 if asked is None or asked < 0 else max(0, n_places - asked)

    def _n_expert_blocks(self) -> int:
        return max((block.index + 1 for block in self.shape.trunk if block.weights.experts), default=0)

    def _plan(self, wish: Wish, state: _Try, pipelined: bool) -> MemoryPlan:
        key = (wish, state, pipelined)
        if key not in self._plans:
            self._plans[key] = self.lay_out(
                replace(wish, choice=state.choice),
                n_cpu_moe=state.n_cpu_moe,
                n_on_host=state.n_on_host,
                pipelined=pipelined,
            )
        return self._plans[key]

    def _may_pipeline(self, wish: Wish, state: _Try) -> bool:
        """llama.cpp's own conditions (llama_context's constructor)."""
        return (
            wish.pipeline != "off"
            and wish.split_mode == "layer"
            and len(self.box.devices) > 1
            and state.n_on_host == 0
            and state.n_cpu_moe == 0
            and not wish.overrides
            and state.choice.offload_kqv
        )

    def _fits(self, wish: Wish, state: _Try) -> bool:
        return self._room(wish, state) >= 0

    def _room(self, wish: Wish, state: _Try) -> int:
        """Bytes left on the fullest of all, without pipelining, which takes more, unless it must be."""
        forced = wish.pipeline == "on" and self._may_pipeline(wish, state)
        plan = self._plan(wish, state, forced)
        return min(each.room_bytes for each in (*plan.devices, plan.host))

    def _search(self, wish: Wish, start: _Try) -> _Try | None:
        """Weights stay where they are while sizes can give way; then experts go to the host, then blocks."""
        found = self._shrink(wish, start)
        if found is None and self._could_shrink(wish, start):
            return None  # it is the sizes asked for that are too large, not the model
        if found is None and wish.n_cpu_moe is None and self._devices(wish) and self._n_expert_blocks():
            start = replace(start, n_cpu_moe=self._n_expert_blocks())
            found = self._shrink(wish, start)
            found = found and self._with_fewest_experts(wish, found)
        if found is None and wish.n_gpu_layers is None and self._devices(wish):
            low, high = start.n_on_host, self.shape.n_blocks + 1
            while low < high:
                middle = (low + high) // 2
                if self._shrink(wish, replace(start, n_on_host=middle)):
                    high = middle
                else:
                    low = middle + 1
            found = self._shrink(wish, replace(start, n_on_host=low))
        return found

    def _could_shrink(self, wish: Wish, start: _Try) -> bool:
        """Whether the weights would fit where they are if nothing had been asked for by hand."""
        return bool(wish.given) and self._shrink(replace(wish, given=frozenset()), start) is not None

    def _shrink(self, wish: Wish, start: _Try) -> _Try | None:
        """The first rung of the ladder that fits, the context last; None when even the lowest does not."""
        state = start
        for state in self._ladder(wish, start):
            if self._fits(wish, state):
                return self._undone(wish, start, state)
        if "n_ctx" in wish.given:
            return None
        return self._widest(wish, state, wish.least_ctx)

    def _undone(self, wish: Wish, start: _Try, state: _Try) -> _Try:
        """What gave way on upper rungs without need goes back."""
        first = start.choice
        for name in ("n_ubatch", "cache_type_k", "n_slots"):
            back: dict[str, Any] = {name: getattr(first, name)}
            if name == "cache_type_k":
                back["cache_type_v"] = first.cache_type_v
            higher = replace(state, choice=replace(state.choice, **back))
            if higher != state and self._fits(wish, higher):
                state = higher
        return state

    def _ladder(self, wish: Wish, state: _Try) -> Iterator[_Try]:
        """ubatch, cache type, slots; each on top of the last."""
        yield state
        choice = state.choice
        if "n_ubatch" not in wish.given:
            while choice.n_ubatch // 2 >= LEAST_UBATCH:
                choice = replace(choice, n_ubatch=choice.n_ubatch // 2)
                yield replace(state, choice=choice)
        if "cache_type" not in wish.given and self.can_quantise(choice):
            choice = replace(choice, cache_type_k=_QUANTISED, cache_type_v=_QUANTISED)
            yield replace(state, choice=choice)
        # sequences share the cells of a unified cache; only states and windows are for each
        if "n_slots" not in wish.given and (self.shape.is_recurrent or self.shape.window):
            while choice.n_slots > 1:
                choice = replace(choice, n_slots=choice.n_slots // 2, n_seq_max=0)
                yield replace(state, choice=choice)

    def can_quantise(self, choice: ContextChoice) -> bool:
        """A q8_0 cache halves an f16 one where flash attention runs and whole blocks make a head."""
        shape = self.shape
        widths = [shape.head_k, *([] if shape.is_latent else [shape.head_v]), shape.indexer_width]
        fits_blocks = all(width % _ROW == 0 for width in widths)
        return choice.flash_attn and fits_blocks and {choice.cache_type_k, choice.cache_type_v} <= UNQUANTISED

    def _widest(self, wish: Wish, state: _Try, least: int, roughly: int = 0) -> _Try | None:
        """The largest context, in steps, that fits; or one that is smaller by one part in `roughly` at most."""
        n_streams = state.choice.cells(self.shape.n_ctx_train).n_streams
        step = n_streams * (CELLS if least < 8192 else 4 * CELLS)
        most = (state.choice.n_ctx or self.shape.n_ctx_train) // step
        low, high = max(1, least // step) - 1, max(1, most)

        def with_context(n_steps: int) -> _Try:
            return replace(state, choice=replace(state.choice, n_ctx=n_steps * step))

        low += 1
        room_low, room_high = self._room(wish, with_context(low)), self._room(wish, with_context(high))
        if room_low < 0:
            return None
        if room_high >= 0:
            return with_context(high)
        while high - low > 1:
            # sizes are nearly straight lines in the context, so a few chords find the end
            steps = (high - low) * room_low // (room_low - room_high)
            if steps <= low // roughly if roughly else not steps:
                break
            guess = min(low + steps, high - 1)
            room = self._room(wish, with_context(guess))
            if room >= 0:
                low, room_low = guess, room
            else:
                high, room_high = guess, room
        return with_context(low)

    def _with_fewest_experts(self, wish: Wish, state: _Try) -> _Try:
        low, high = 1, state.n_cpu_moe
        while low < high:
            middle = (low + high) // 2
            if self._fits(wish, replace(state, n_cpu_moe=middle)):
                high = middle
            else:
                low = middle + 1
        return replace(state, n_cpu_moe=low)


def _changes(start: _Try, found: _Try) -> Iterator[Change]:
    before, after = start.choice, found.choice
    if after.n_ubatch != before.n_ubatch:
        yield Change("--ubatch-size", str(before.n_ubatch), str(after.n_ubatch))
    if (after.cache_type_k, after.cache_type_v) != (before.cache_type_k, before.cache_type_v):
        types = before.cache_type_k
        if before.cache_type_v != types:
            types += f" and {before.cache_type_v}"
        yield Change("--cache-type-k and --cache-type-v", types, after.cache_type_k)
    if after.n_slots != before.n_slots:
        yield Change("--parallel", str(before.n_slots), str(after.n_slots))
    if after.n_ctx != before.n_ctx:
        yield Change("--ctx-size", str(before.n_ctx or "as trained"), str(after.n_ctx))
    if found.n_cpu_moe != start.n_cpu_moe:
        yield Change("--n-cpu-moe", str(start.n_cpu_moe), str(found.n_cpu_moe))
    if found.n_on_host != start.n_on_host:
        yield Change("blocks on the CPU", str(start.n_on_host), str(found.n_on_host))
