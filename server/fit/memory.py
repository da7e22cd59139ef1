"""The sums: how many bytes of what each device and the host will hold. Row by row; `plan_memory` is the entry.

docs/fit.md has the formulas and their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from server.fit.choice import Cells, ContextChoice, Device, Placement, place_by_counts, place_on_host
from server.fit.facts import ModelShape

__all__ = [
    "Cells",
    "ContextChoice",
    "Device",
    "DevicePlan",
    "MemoryPlan",
    "Part",
    "Placement",
    "Row",
    "place_by_counts",
    "place_on_host",
]


class Part(Enum):
    """What memory is taken for."""

    WEIGHTS = "weights"
    CACHE = "cache"
    COMPUTE = "compute buffer"
    MTP_WEIGHTS = "MTP weights"
    MTP_CACHE = "MTP cache"
    MTP_COMPUTE = "MTP compute buffer"
    OVERHEAD = "context overhead"
    OUTPUT = "logits"  # host: the rows that llama.cpp copies out
    HOST_CACHE = "host cache"  # host: --cache-ram
    MARGIN = "margin"


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
    def fits(self) -> bool:
        return self.total_bytes <= self.device.free_bytes

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

    @property
    def fits(self) -> bool:
        return self.host.fits and all(plan.fits for plan in self.devices)

    @property
    def fullest(self) -> DevicePlan:
        """The device with the least room left; the host when there is no other."""
        return min(self.devices, key=lambda plan: plan.device.free_bytes - plan.total_bytes, default=self.host)
