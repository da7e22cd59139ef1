"""Numbers as people read them."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


def size(n_bytes: int) -> str:
    """GiB with one decimal; less than half a GiB in MiB."""
    if abs(n_bytes) >= GIB // 2:
        return f"{n_bytes / GIB:.1f} GiB"
    return f"{n_bytes / MIB:.0f} MiB" if abs(n_bytes) >= 10 * MIB else f"{n_bytes / MIB:.1f} MiB"


def count(n: int) -> str:
    """A large number in words: 753.9 billion."""
    unit, name = (10**9, "billion") if n >= 10**9 else (10**6, "million")
    return f"{n / unit:.1f} {name}"


def tokens(n: int) -> str:
    return f"{n:,}"
