"""Fewer blocks and devices that take the same memory: a graph of 80 blocks over 8 devices repeats itself.

The allocator is in the same state after each block of a kind, so of a device's run three blocks of each kind tell its
peak, and devices with equal runs have equal buffers. Two things of a dropped block stay: the model's last block, where
only the rows with logits go on, and the zeros that blocks behind an indexer hold from the start of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.fit.choice import Placement
from server.fit.facts import Block, ModelShape

_KEPT_OF_A_KIND = 3


@dataclass(frozen=True, slots=True)
class Representatives:
    """`backend_of`: for each device of the placement and then the host, the backend that stands for it."""

    blocks: tuple[Block, ...]
    homes: Mapping[int, int]  # backend by block index
    output: int
    host: int
    backend_of: tuple[int, ...]
    idle: Mapping[int, int]  # blocks left out after a block


def representatives(shape: ModelShape, placement: Placement) -> Representatives:
    """All blocks and devices where parts of the trunk are apart from their devices: there each block counts."""
    runs = _runs(shape, placement)
    if runs is None:
        return all_of(shape, placement)
    kept: list[Block] = []
    homes: dict[int, int] = {}
    idle: dict[int, int] = {}
    backend_of: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    last = shape.trunk[-1]
    for device, run in enumerate(runs):
        ends = not run or run[0].index == 0 or run[-1] is last or placement.output == device
        signature = (device,) if ends else tuple(_kind(block) for block in run)
        if signature not in known:
            backend = known[signature] = len(known)
            chosen = _chosen(run, last)
            kept += chosen
            homes |= {block.index: backend for block in chosen}
            ends_at = [block.index for block in chosen[1:]] + [run[-1].index + 1] if run else []
            idle |= {block.index: end - block.index - 1 for block, end in zip(chosen, ends_at, strict=True)}
        backend_of.append(known[signature])
    host = len(known) if placement.devices else 0
    output = host if placement.output is None else backend_of[placement.output]
    if placement.devices:
        backend_of.append(host)
    return Representatives(tuple(kept), homes, output, host, tuple(backend_of), idle)


def _runs(shape: ModelShape, placement: Placement) -> list[tuple[Block, ...]] | None:
    """The trunk's blocks of each device in turn, or all of them on the host; None when it is not that simple."""
    if placement.experts_on_host:
        return None
    homes = [placement.blocks[block.index] for block in shape.trunk]
    if not placement.devices:
        return [shape.trunk]
    devices = [home for home in homes if home is not None]
    if len(devices) != len(homes) or placement.output is None or devices != sorted(devices):
        return None
    return [
        tuple(block for block in shape.trunk if placement.blocks[block.index] == device)
        for device in range(len(placement.devices))
    ]


def _chosen(run: tuple[Block, ...], last: Block) -> list[Block]:
    seen: dict[tuple[object, ...], int] = {}
    chosen = []
    for block in run:
        kind = _kind(block)
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _KEPT_OF_A_KIND or block is last:
            chosen.append(block)
    return chosen


def _kind(block: Block) -> tuple[object, ...]:
    return bool(block.weights.experts), bool(block.kept.indexer_values), block.n_ff, block.kept.in_window


def all_of(shape: ModelShape, placement: Placement) -> Representatives:
    """Every block and device for itself."""
    host = len(placement.devices)
    homes = {index: host if home is None else home for index, home in enumerate(placement.blocks)}
    output = host if placement.output is None else placement.output
    return Representatives(shape.trunk, homes, output, host, tuple(range(host + 1)), {})
