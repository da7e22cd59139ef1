"""The sums: how many bytes of what each device and the host will hold. Row by row; `plan_memory` is the entry.

docs/fit.md has the formulas and their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from server.fit.cells import cache_bytes
from server.fit.choice import Cells, ContextChoice, Device, Placement, place_by_counts, place_on_host
from server.fit.compute import compute_bytes, is_exact
from server.fit.facts import Block, ModelShape

__all__ = [
    "Cells",
    "Compute",
    "ContextChoice",
    "Device",
    "DevicePlan",
    "MemoryPlan",
    "Part",
    "Placement",
    "Reserves",
    "Row",
    "place_by_counts",
    "place_on_host",
    "plan_memory",
]

Compute = Callable[..., tuple[int, ...]]
_MIB, _GIB = 1 << 20, 1 << 30


class Part(Enum):
    """What memory is taken for."""

    WEIGHTS = "weights"
    CACHE = "cache"
    COMPUTE = "compute buffer"
    MTP_WEIGHTS = "MTP weights"
    MTP_CACHE = "MTP cache"
    MTP_COMPUTE = "MTP compute buffer"
    OVERHEAD = "overhead"
    OUTPUT = "logits"  # host: the rows that llama.cpp copies out
    HOST_CACHE = "host cache"  # host: --cache-ram
    MARGIN = "margin"


@dataclass(frozen=True, slots=True)
class Reserves:
    """What is held back beside what llama.cpp tells. Bytes."""

    device_overhead: int = 512 * _MIB  # a CUDA context, its kernels and the first pools
    device_margin: int = 1 * _GIB  # llama.cpp's --fit-target
    host_overhead: int = 640 * _MIB  # the two processes, the vocabulary twice
    host_margin: int = 1 * _GIB


@dataclass(frozen=True, slots=True)
class Row:
    """`why` is the sum in words and numbers, for --explain."""

    part: Part
    n_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class DevicePlan:
    device: Device
    rows: tuple[Row, ...]

    @property
    def total_bytes(self) -> int:
        return sum(row.n_bytes for row in self.rows)

    @property
    def needed_bytes(self) -> int:
        """The total without the margin: what the device will hold."""
        return self.total_bytes - self.of(Part.MARGIN)

    @property
    def room_bytes(self) -> int:
        """What would be left, the margin held back; negative: so much is missing."""
        return self.device.free_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        return self.room_bytes >= 0

    def of(self, part: Part) -> int:
        return sum(row.n_bytes for row in self.rows if row.part is part)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`devices` in the placement's order; `host` is the memory of the machine itself."""

    shape: ModelShape
    choice: ContextChoice
    placement: Placement
    cells: Cells
    devices: tuple[DevicePlan, ...]
    host: DevicePlan
    is_exact: bool  # False: the architecture's cache or compute buffer is an estimate

    @property
    def fits(self) -> bool:
        return self.host.fits and all(plan.fits for plan in self.devices)

    @property
    def fullest(self) -> DevicePlan:
        """The device with the least room left; the host when there is no other."""
        return min(self.devices, key=lambda plan: plan.room_bytes, default=self.host)


def plan_memory(
    shape: ModelShape,
    choice: ContextChoice,
    placement: Placement,
    host: Device,
    *,
    reserves: Reserves | None = None,
    compute: Compute = compute_bytes,
) -> MemoryPlan:
    """Add up one choice on one placement. `host` is the machine's memory as a device. `compute` may be replaced by what
    a dry run told. Raises ValueError when a cache type does not divide a row (`row_bytes`)."""
    sums = _Sums(shape, choice, placement, reserves or Reserves(), compute)
    devices = tuple(DevicePlan(device, sums.device(index)) for index, device in enumerate(placement.devices))
    return MemoryPlan(
        shape=shape,
        choice=choice,
        placement=placement,
        cells=sums.cells,
        devices=devices,
        host=DevicePlan(host, sums.host()),
        is_exact=shape.cache_is_known and is_exact(shape),
    )


class _Sums:
    def __init__(
        self, shape: ModelShape, choice: ContextChoice, placement: Placement, reserves: Reserves, compute: Compute
    ) -> None:
        self.cells = choice.cells(shape.n_ctx_train)
        self._shape = shape
        self._choice = choice
        self._placement = placement
        self._reserves = reserves
        self._compute = compute(shape, choice, placement)
        self._drafts = choice.mtp and bool(shape.nextn)
        self._draft_compute = compute(shape, choice, placement, draft=True) if self._drafts else ()

    def device(self, index: int) -> tuple[Row, ...]:
        reserves = self._reserves
        rows = [
            self._weights(index),
            self._cache(Part.CACHE, index, self._shape.trunk),
            self._buffer(Part.COMPUTE, self._compute[index]),
            *self._draft(index, self._draft_compute[index] if self._drafts else 0),
            Row(Part.OVERHEAD, reserves.device_overhead, "the device's context, kernels and memory pools"),
            Row(Part.MARGIN, reserves.device_margin, "held back"),
        ]
        return tuple(row for row in rows if row.n_bytes)

    def host(self) -> tuple[Row, ...]:
        choice, reserves = self._choice, self._reserves
        rows = [
            self._weights(None),
            self._cache(Part.CACHE, None, self._shape.trunk),
            self._buffer(Part.COMPUTE, self._compute[-1]),
            *self._draft(None, self._draft_compute[-1] if self._drafts else 0),
            self._logits(),
            Row(Part.HOST_CACHE, choice.cache_ram_bytes, "--cache-ram: sequences that were moved out of the cache"),
            Row(Part.OVERHEAD, reserves.host_overhead, "the server's two processes"),
            Row(Part.MARGIN, reserves.host_margin, "held back"),
        ]
        return tuple(row for row in rows if row.n_bytes)

    def _weights(self, home: int | None) -> Row:
        shape, placement = self._shape, self._placement
        here = [block for block in shape.trunk if placement.blocks[block.index] == home]
        n_bytes = sum(self._bytes_at_home(block) for block in here)
        parts = [f"{len(here)} blocks {_size(n_bytes)}"] if here else []
        if placement.output == home and not (home is None and shape.output_is_tied):
            n_bytes += shape.output_bytes
            parts.append(f"output {_size(shape.output_bytes)}")
        if home is None:
            outside = shape.token_embd_bytes + shape.other_bytes
            experts = self._experts_on_host()
            n_bytes += outside + experts
            parts.append(f"token embedding {_size(outside)}")
            if experts:
                parts.append(f"experts of {len(placement.experts_on_host)} blocks {_size(experts)}")
        return Row(Part.WEIGHTS, n_bytes, " + ".join(parts))

    def _bytes_at_home(self, block: Block) -> int:
        """Without its experts, if those are on the host and it is not."""
        apart = block.index in self._placement.experts_on_host
        return block.weights.total - (block.weights.experts if apart else 0)

    def _experts_on_host(self) -> int:
        apart = self._placement.experts_on_host
        return sum(block.weights.experts for block in self._shape.trunk if block.index in apart)

    def _cache(self, part: Part, home: int | None, blocks: Iterable[Block]) -> Row:
        choice, cells = self._choice, self.cells
        here = [block for block in blocks if self._cache_home(block) == home]
        on_cuda = home is not None and self._placement.devices[home].is_cuda
        n_bytes = sum(cache_bytes(self._shape, block, choice, cells, on_cuda=on_cuda) for block in here)
        streams = f"{cells.n_streams} x {cells.n_ctx_seq}" if cells.n_streams > 1 else f"{cells.n_ctx}"
        types = choice.cache_type_k
        if choice.cache_type_v != types:
            types += f" and {choice.cache_type_v}"
        return Row(part, n_bytes, f"{streams} cells x {len(here)} blocks, {types}")

    def _cache_home(self, block: Block) -> int | None:
        return self._placement.blocks[block.index] if self._choice.offload_kqv else None

    def _buffer(self, part: Part, n_bytes: int) -> Row:
        n_tokens = self._choice.n_tokens(self._shape.n_ctx_train)
        copies = ", four copies of the inputs (pipelined)" if self._placement.pipelined else ""
        why = f"{n_tokens} tokens a pass with {self.cells.n_ctx_seq} cells in sight{copies}"
        return Row(part, n_bytes, why)

    def _draft(self, home: int | None, compute: int) -> list[Row]:
        if not self._drafts:
            return []
        here = [block for block in self._shape.nextn if self._placement.blocks[block.index] == home]
        n_bytes = sum(self._bytes_at_home(block) for block in here)
        if home is None:
            apart = self._placement.experts_on_host
            n_bytes += sum(block.weights.experts for block in self._shape.nextn if block.index in apart)
        return [
            Row(Part.MTP_WEIGHTS, n_bytes, f"{len(here)} NextN block"),
            self._cache(Part.MTP_CACHE, home, self._shape.nextn),
            self._buffer(Part.MTP_COMPUTE, compute),
        ]

    def _logits(self) -> Row:
        """One row for each sequence at least, whether it is asked for or not (llama_context::output_reserve)."""
        shape, n_rows = self._shape, self._choice.n_outputs
        n_bytes = 4 * shape.n_vocab * n_rows
        why = f"{n_rows} rows of {shape.n_vocab} values"
        if self._drafts:  # and in both contexts; the trunk hands on its last states, a row for each token of a batch
            n_bytes = 2 * n_bytes + 4 * shape.n_embd * self._choice.n_batch
            why += f", twice, and {self._choice.n_batch} states of {shape.n_embd}"
        return Row(Part.OUTPUT, n_bytes, why)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f} GiB"
