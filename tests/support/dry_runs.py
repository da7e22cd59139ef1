"""The table of llama.cpp's dry runs that plans are compared with. scripts/measure_dry_runs.py writes it."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from server.fit.choice import ContextChoice, Device, Placement, place_by_counts

TABLE = Path(__file__).parents[1] / "fit" / "dry_runs.json"


@dataclass(frozen=True)
class Case:
    """`compute`: bytes of each device and then the host; `cache`: bytes of all places; `n_apart`: --n-cpu-moe;
    `n_on_host`: blocks that --n-gpu-layers leaves there."""

    model: str
    counts: tuple[int, ...]
    pipelined: bool
    draft: bool
    n_apart: int
    n_on_host: int
    offload_kqv: bool
    n_ctx: int
    n_slots: int
    unified: bool
    n_ubatch: int
    cache_type: str
    cache: int
    compute: tuple[int, ...]

    def row(self) -> list[Any]:
        return [int(value) if isinstance(value, bool) else value for value in astuple(self)]

    def choice(self) -> ContextChoice:
        return ContextChoice(
            n_ctx=self.n_ctx,
            n_slots=self.n_slots,
            kv_unified=self.unified,
            n_batch=8192,
            n_ubatch=self.n_ubatch,
            cache_type_k=self.cache_type,
            cache_type_v=self.cache_type,
            mtp=self.draft,
            offload_kqv=self.offload_kqv,
        )

    def placement(self) -> Placement:
        devices = [Device(f"FAKE{index}", 80 << 30, 80 << 30) for index in range(len(self.counts))]
        apart = frozenset(range(self.n_apart))
        return place_by_counts(
            devices,
            self.counts,
            sum(self.counts) + self.n_on_host - 1,
            n_on_host=self.n_on_host,
            experts_on_host=apart,
            pipelined=self.pipelined,
        )


def read_table() -> list[Case]:
    return [_case(*row) for row in json.loads(TABLE.read_text())]


def _case(model: str, counts: list[int], pipelined: int, draft: int, n_apart: int, *rest: Any) -> Case:
    n_on_host, offload_kqv, n_ctx, n_slots, unified, n_ubatch, cache_type, cache, compute = rest
    placed = (bool(pipelined), bool(draft), n_apart, n_on_host, bool(offload_kqv))
    sizes = (n_ctx, n_slots, bool(unified), n_ubatch, cache_type, cache)
    return Case(model, tuple(counts), *placed, *sizes, tuple(compute))
