"""Tensors that --override-tensor puts elsewhere: which of a model's they are, and what that does to a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from server.fit.facts import Kind, ModelShape, kind_of
from server.fit.memory import DevicePlan, MemoryPlan, Part, Row
from server.fit.words import size


@dataclass(frozen=True, slots=True)
class Move:
    """`n_bytes` of one block go to the buffer type `to`, a device's name or one of the host's."""

    block: int
    to: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Moves:
    """`experts` are the blocks all of whose experts go to the host, as with --n-cpu-moe; `others` all the rest."""

    experts: frozenset[int] = frozenset()
    others: tuple[Move, ...] = ()


def moves_of(shape: ModelShape, overrides: Sequence[tuple[str, str]], devices: Iterable[str]) -> Moves:
    """`overrides` are (regular expression, buffer type) in the order in which llama.cpp tries them."""
    if not overrides:
        return Moves()
    names = set(devices)
    patterns = [(re.compile(pattern), to) for pattern, to in overrides]
    experts: set[int] = set()
    others: dict[tuple[int, str], int] = {}
    for block in shape.trunk:
        moved: dict[str, str] = {}
        for name in block.tensors:
            to = next((to for pattern, to in patterns if pattern.search(f"blk.{block.index}.{name}")), None)
            if to is not None:
                moved[name] = to
        all_experts = [name for name in block.tensors if kind_of(name) is Kind.EXPERTS]
        if all_experts and all(name in moved and moved[name] not in names for name in all_experts):
            experts.add(block.index)
            moved = {name: to for name, to in moved.items() if name not in all_experts}
        for name, to in moved.items():
            others[block.index, to] = others.get((block.index, to), 0) + block.tensors[name]
    return Moves(frozenset(experts), tuple(Move(index, to, n) for (index, to), n in others.items()))


def moved(plan: MemoryPlan, moves: Moves) -> MemoryPlan:
    """The plan with `moves.others` where they go; experts are in its placement already."""
    if not moves.others:
        return plan
    by_name = {each.device.name: index for index, each in enumerate(plan.devices)}
    change: dict[int | None, int] = {}
    for move in moves.others:
        home, to = plan.placement.blocks[move.block], by_name.get(move.to)
        if home != to:
            change[home] = change.get(home, 0) - move.n_bytes
            change[to] = change.get(to, 0) + move.n_bytes
    devices = tuple(_changed(each, change.get(index, 0)) for index, each in enumerate(plan.devices))
    return replace(plan, devices=devices, host=_changed(plan.host, change.get(None, 0)))


def _changed(plan: DevicePlan, n_bytes: int) -> DevicePlan:
    if not n_bytes:
        return plan
    rows = [row for row in plan.rows if row.part is not Part.WEIGHTS]
    old = next((row for row in plan.rows if row.part is Part.WEIGHTS), Row(Part.WEIGHTS, 0, "nothing"))
    verb = "and by" if n_bytes > 0 else "less by"
    why = f"{old.why}, {verb} --override-tensor {size(abs(n_bytes))}"
    return replace(plan, rows=(Row(Part.WEIGHTS, old.n_bytes + n_bytes, why), *rows))
