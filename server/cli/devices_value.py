"""The kinds of values of `python -m server plan`: devices, sizes of memory, bandwidths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from server.cli.special_values import MAX_DEVICES
from server.cli.values import BadValue, Kind

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_NAMED = re.compile(r"(?![xX]\d)[A-Za-z][\w .+-]*")
# GB of memory by a word of the name; sizes of their own are in the names ("A100-80GB")
_MEMORY_GIB = (
    ("B200", 180), ("H200", 141), ("H100", 80), ("H800", 80), ("H20", 96), ("A100", 80), ("A800", 80),
    ("PRO 6000", 96), ("A6000", 48), ("6000 ADA", 48), ("L40", 48), ("L4", 24), ("A40", 48), ("A30", 24),
    ("A10", 24), ("V100", 32), ("T4", 16), ("5090", 32), ("4090", 24), ("3090", 24), ("MI300X", 192),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A GPU that is only thought of. `name` as makers write it, or empty."""

    n_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySize(Kind):
    """Bytes, as 80GiB or 80GB; a bare number is GiB."""

    metavar: str = "SIZE"
    sample: str = "512GiB"

    @property
    def rule(self) -> str:
        return "a size such as 512GiB or 512GB"

    def parse(self, text: str) -> int:
        size = _size(text.strip())
        if size is None:
            raise BadValue(self.rule)
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevices(Kind):
    metavar: str = "N×SIZE"
    sample: str = "8x80GiB"

    @property
    def rule(self) -> str:
        return f"up to {MAX_DEVICES} GPUs as COUNTxSIZE or COUNTxNAME, separated by commas, or none for the CPU alone"

    def parse(self, text: str) -> tuple[PlannedDevice, ...]:
        if text.strip().lower() in ("none", "cpu"):
            return ()
        devices: list[PlannedDevice] = []
        for part in text.split(","):
            match = re.fullmatch(r"(?:(\d{1,2})\s*[xX×*]\s*)?(.+)", part.strip())
            device = _device(match[2].strip()) if match else None
            if match is None or device is None:
                raise BadValue(self.rule)
            devices += [device] * int(match[1] or 1)
        if not 0 < len(devices) <= MAX_DEVICES:
            raise BadValue(self.rule)
        return tuple(devices)

    def plain(self, value: Any) -> Any:
        return ",".join(f"{device.n_bytes >> 20}MiB" for device in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths(Kind):
    """Bytes a second of a GPU's memory and, behind a comma, of the host's."""

    metavar: str = "GB/s"
    sample: str = "1800,120"

    @property
    def rule(self) -> str:
        return "GB a second of a GPU's memory, or two numbers: of a GPU's and of the host's"

    def parse(self, text: str) -> tuple[float | None, float | None]:
        parts = text.split(",")
        try:
            rates = [float(part) * 1e9 for part in parts]
        except ValueError:
            raise BadValue(self.rule) from None
        if len(rates) > 2 or not all(0 < rate < 1e15 for rate in rates):
            raise BadValue(self.rule)
        return rates[0], rates[1] if len(rates) > 1 else None


def _device(text: str) -> PlannedDevice | None:
    size = _size(text)
    if size is not None:
        return PlannedDevice(size)
    if not _NAMED.fullmatch(text):
        return None
    said = re.search(r"(\d+) ?GI?B\b", text, re.IGNORECASE)
    name = re.sub(r"[-_]+", " ", text.upper())
    gib = int(said[1]) if said else next((size for word, size in _MEMORY_GIB if word in name), None)
    return PlannedDevice(gib << 30, text) if gib else None


def _size(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    if not match:
        return None
    unit = match[2].upper() or "G"
    # GPUs are sold in GB and have GiB; RAM too
    return int(float(match[1]) * 1024 ** _POWERS[unit])
