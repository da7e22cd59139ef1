"""What a step costs in Python, by the script that docs/benchmarks.md quotes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_step_costs_a_fraction_of_a_millisecond() -> None:
    """Under 0.3 ms with 8 slots and 1 ms with 64, in processor time; the script itself prints 0.06 and 0.4."""
    command = [sys.executable, "scripts/bench_step.py", "--steps", "300", "--context", "500"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    medians = {int(n): float(ms) for n, ms in re.findall(r"(\d+) slots: step median ([\d.]+) ms", result.stdout)}
    assert medians.keys() == {8, 64}
    assert medians[8] < 0.3
    assert medians[64] < 1.0
