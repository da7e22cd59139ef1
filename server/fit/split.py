"""Layer split as pure arithmetic: which device holds which blocks, in whole numbers of blocks.

llama.cpp puts contiguous runs of blocks on the devices (src/llama-model.cpp, load_tensors). Left alone it cuts by free
memory, in float32, and a few megabytes of difference move a whole block. Proportions that are whole numbers and add up
to the number of blocks divide exactly, so the cut is the one that was asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate


def best_split(loads: Sequence[int], room: Sequence[int], sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """How many of the blocks each device gets, so that the smallest room left over is as large as it can be.

    `loads` are bytes per block in order, `room` bytes per device for blocks, which may be negative: nothing fits then,
    and the split is the least bad one. Among splits that are as good but for half a percent of what lies on the fullest
    device, the block counts follow the `sizes` of the devices most evenly (None: their rooms). The counts add up to
    len(loads). Raises ValueError without a device.
    """
    if not room:
        raise ValueError("a split needs at least one device")
    sums = [0, *accumulate(loads)]
    low = min(room) - sums[-1]  # left over when everything lies on the smallest device
    high = min(room)  # left over there when it gets nothing
    while low < high:
        middle = (low + high + 1) // 2
        if _reach(sums, room, middle)[-1] == len(loads):
            low = middle
        else:
            high = middle - 1
    # a split that differs in nothing but a few megabytes of small tensors is no reason for odd numbers
    return _most_even(sums, room, low - max(0, min(room) - low) // 200, room if sizes is None else sizes)


def smallest_rest(loads: Sequence[int], room: Sequence[int], split: Sequence[int]) -> int:
    """Bytes left on the fullest device."""
    sums = [0, *accumulate(loads)]
    ends = list(accumulate(split))
    return min(rest - (sums[end] - sums[end - n]) for rest, end, n in zip(room, ends, split, strict=True))


def _reach(sums: Sequence[int], room: Sequence[int], rest: int) -> list[int]:
    """For each device, how many blocks lie on it and those before it when each is filled until only `rest` is left."""
    ends = []
    end = 0
    for each in room:
        limit = sums[end] + each - rest
        while end + 1 < len(sums) and sums[end + 1] <= limit:
            end += 1
        ends.append(end)
    return ends


def _most_even(sums: Sequence[int], room: Sequence[int], rest: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the splits that leave `rest` everywhere, one whose ends lie as near as they may to shares by size."""
    n_blocks = len(sums) - 1
    latest = _reach(sums, room, rest)
    # from the back: how early the blocks of a device may begin so that all behind still fit
    earliest = [n_blocks]
    for each in reversed(room[1:]):
        start = earliest[0]
        while start > 0 and sums[earliest[0]] - sums[start - 1] <= each - rest:
            start -= 1
        earliest.insert(0, start)
    shares = [max(each, 0) for each in sizes]
    if not any(shares):
        shares = [1] * len(room)
    whole = sum(shares)
    counts: list[int] = []
    end = 0
    for device, upto in enumerate(accumulate(shares)):
        wish = (n_blocks * upto * 2 + whole) // (2 * whole)  # rounded to the nearest
        # what this device itself can take, given where it begins
        most = end
        while most < n_blocks and sums[most + 1] - sums[end] <= room[device] - rest:
            most += 1
        new_end = min(max(wish, earliest[device], end), most, latest[device])
        counts.append(new_end - end)
        end = new_end
    return tuple(counts)


def device_of_blocks(n_blocks: int, proportions: Sequence[float], n_on_gpu: int | None = None) -> list[int | None]:
    """The device of each block as llama.cpp works it out from `proportions`; None: the CPU. The last `n_on_gpu` blocks
    are on the GPUs, all where it is None. Single precision as there: the borders depend on it."""
    n = n_blocks if n_on_gpu is None else min(n_on_gpu, n_blocks)
    points: list[float] = []
    total = 0.0
    for each in proportions:
        total = _f32(total + _f32(each))
        points.append(total)
    points = [_f32(point / total) if total else 0.0 for point in points]
    first = n_blocks - n
    devices: list[int | None] = [None] * first
    for block in range(n):
        at = _f32(_f32(float(block)) / n)
        device = next((number for number, point in enumerate(points) if point > at), None)
        devices.append(device)
    return devices


def counts_of(devices: Sequence[int | None], n_devices: int) -> tuple[int, ...]:
    """Blocks of each device."""
    counts = [0] * n_devices
    for device in devices:
        if device is not None:
            counts[device] += 1
    return tuple(counts)


def _f32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
