"""How fast one answer can be written at most: every token reads its weights and the cache once, at memory's speed.

    seconds a token >= sum over devices of (active weights + cache) / bandwidth

Layers run one after another, so with a layer split the devices' times add up, and more GPUs make a single answer no
faster. What is reached is less: kernels wait for each other. 8 x A100 wrote 23.4 tokens a second of GLM-5.2 UD-Q4_K_M
in llama.cpp (github.com/anthony-chaudhary/fak, issue 3075); `_SEEN_SHARE` is a span around what that is of the bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.fit.cells import cache_bytes
from server.fit.facts import Block, ModelShape
from server.fit.memory import MemoryPlan

_GB = 10**9
_SEEN_SHARE = (0.3, 0.6)

# GB a second, from the makers' data sheets, the first name that a device's contains
_BANDWIDTHS: tuple[tuple[str, int], ...] = (
    ("B200", 8000),  # NVIDIA DGX B200 data sheet: 64 TB/s in eight
    ("H200", 4800),  # NVIDIA H200 data sheet
    ("GH200", 4000),  # NVIDIA GH200 data sheet, HBM3
    ("H100 NVL", 3938),  # NVIDIA H100 data sheet
    ("H100 PCIE", 2000),  # NVIDIA H100 data sheet
    ("H100", 3350),  # NVIDIA H100 data sheet, SXM
    ("H800", 3350),  # as H100 SXM
    ("H20", 4000),  # NVIDIA H20 data sheet
    ("A100 40GB", 1555),  # NVIDIA A100 data sheet, 40 GB
    ("A100 PCIE", 1935),  # NVIDIA A100 80GB PCIe data sheet
    ("A100", 2039),  # NVIDIA A100 80GB SXM data sheet
    ("A800", 2039),  # as A100
    ("RTX PRO 6000", 1792),  # NVIDIA RTX PRO 6000 Blackwell data sheet
    ("RTX 6000 ADA", 960),  # NVIDIA RTX 6000 Ada data sheet
    ("RTX A6000", 768),  # NVIDIA RTX A6000 data sheet
    ("L40S", 864),  # NVIDIA L40S data sheet
    ("L40", 864),  # NVIDIA L40 data sheet
    ("L4", 300),  # NVIDIA L4 data sheet
    ("A40", 696),  # NVIDIA A40 data sheet
    ("A30", 933),  # NVIDIA A30 data sheet
    ("A10", 600),  # NVIDIA A10 data sheet
    ("V100", 900),  # NVIDIA V100 data sheet, SXM2
    ("T4", 300),  # NVIDIA T4 data sheet
    ("RTX 5090", 1792),  # NVIDIA GeForce RTX 5090 specifications
    ("RTX 4090", 1008),  # NVIDIA GeForce RTX 4090 specifications
    ("RTX 3090", 936),  # NVIDIA GeForce RTX 3090 specifications
    ("MI300X", 5300),  # AMD Instinct MI300X data sheet
    ("MI250X", 3277),  # AMD Instinct MI250X data sheet
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one answer with `n_tokens` in its context; `bytes_read` for one token, of devices and host."""

    at_most: float
    expected: tuple[float, float]
    n_tokens: int
    bytes_read: int
    formula: str


def known_bandwidth(description: str) -> int | None:
    """Bytes a second of a GPU by its name, as drivers write it."""
    name = re.sub(r"[-_ ]+", " ", description.upper())
    if "A100" in name and re.search(r"40 ?GB", name):
        return 1555 * _GB
    for known, gigabytes in _BANDWIDTHS:
        if all(re.search(rf"\b{word}", name) for word in known.split()):
            return gigabytes * _GB
    return None


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that are read for one token, with `n_tokens` in its context."""

    n_tokens: int
    on_devices: int
    on_host: int


def reading_of(plan: MemoryPlan, n_tokens: int) -> Reading:
    devices = range(len(plan.placement.devices))
    return Reading(n_tokens, sum(_read_on(plan, each, n_tokens) for each in devices), _read_on(plan, None, n_tokens))


def examples(reading: Reading) -> tuple[tuple[str, float], ...]:
    """What some GPUs could write at most, where nothing is read from the host."""
    names = ("A100", "H100", "H200") if reading.on_devices and not reading.on_host else ()
    return tuple((name, (known_bandwidth(name) or 0) / reading.on_devices) for name in names)


def speed_of(
    plan: MemoryPlan, n_tokens: int, *, device: float | None = None, host: float | None = None
) -> Speed | None:
    """`device` and `host` are measured bytes a second, in place of what is known by name. None: a part that is read has
    no known bandwidth."""
    read_at: dict[float, int] = {}  # bytes by bandwidth
    for index, each in [*enumerate(plan.placement.devices), (None, plan.host.device)]:
        n_bytes = _read_on(plan, index, n_tokens)
        if not n_bytes:
            continue
        bandwidth = host if index is None else device or known_bandwidth(each.description)
        if not bandwidth:
            return None
        read_at[bandwidth] = read_at.get(bandwidth, 0) + n_bytes
    most = 1 / sum(n_bytes / bandwidth for bandwidth, n_bytes in read_at.items())
    terms = " + ".join(f"{n_bytes / _GB:.1f} GB / {rate / _GB:,.0f} GB/s" for rate, n_bytes in read_at.items())
    expected = (most * _SEEN_SHARE[0], most * _SEEN_SHARE[1])
    return Speed(most, expected, n_tokens, sum(read_at.values()), f"1 / ({terms})")


def _read_on(plan: MemoryPlan, home: int | None, n_tokens: int) -> int:
    """Bytes that one token reads there."""
    shape, placement = plan.shape, plan.placement
    total = 0
    for block in shape.trunk:
        apart = block.index in placement.experts_on_host
        if placement.blocks[block.index] == home:
            total += _passed(block) + (0 if apart else _chosen(shape, block))
            total += _cache_read(plan, block, n_tokens)
        elif apart and home is None:
            total += _chosen(shape, block)
    if placement.output == home:
        total += shape.output_bytes
    return total


def _passed(block: Block) -> int:
    return block.weights.attention + block.weights.dense + block.weights.indexer


def _chosen(shape: ModelShape, block: Block) -> int:
    return block.weights.experts * shape.n_expert_used // shape.n_expert if shape.n_expert else block.weights.experts


def _cache_read(plan: MemoryPlan, block: Block, n_tokens: int) -> int:
    whole = cache_bytes(plan.shape, block, plan.choice, plan.cells)
    return whole * min(n_tokens, plan.cells.n_ctx) // plan.cells.n_ctx
