"""A limit on bytes per second that several threads share."""

from __future__ import annotations

import threading
import time

_BURST_S = 0.25


class Pace:
    """A bucket of bytes that fills at `bytes_per_s`; None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()  # when all that was taken is paid for

    def piece(self, most: int) -> int:
        """How much to read at once, so that the rate is even."""
        return most if self.bytes_per_s is None else max(1024, min(most, int(self.bytes_per_s / 16)))

    def debt_s(self, n_bytes: int) -> float:
        """Account for bytes that came, and say how long to wait before the next."""
        if self.bytes_per_s is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + n_bytes / self.bytes_per_s
            return max(0.0, self._free_at - now)
