"""Writes summaries as a table with ratios, or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Final

from server.ops.bench.measures import Summary

# (heading, field of Summary, decimals)
_COLUMNS: Final = (
    ("wall s", "wall_s", 2),
    ("tok/s", "tokens_per_s", 1),
    ("ttft p50", "ttft_p50_ms", 0),
    ("p95", "ttft_p95_ms", 0),
    ("tpot", "tpot_ms", 1),
    ("itl p50", "itl_p50_ms", 1),
    ("p95", "itl_p95_ms", 1),
    ("p99", "itl_p99_ms", 1),
    ("max", "itl_max_ms", 0),
    ("late ttft", "late_ttft_ms", 0),
)


def ratios(ours: Summary, theirs: Summary) -> dict[str, float | None]:
    """Ours by theirs for every column. Below 1 is better for us, but for tokens a second, where above 1 is."""
    return {field: _ratio(getattr(ours, field), getattr(theirs, field)) for _, field, _ in _COLUMNS}


def table(groups: Sequence[Sequence[Summary]]) -> str:
    """A block for each workload: a line for each server and, for two of them, a line of ratios. Times are ms."""
    rows = [["workload", "server", *(heading for heading, _, _ in _COLUMNS)]]
    for group in groups:
        for number, summary in enumerate(group):
            cells = [_number(getattr(summary, field), decimals) for _, field, decimals in _COLUMNS]
            rows.append([summary.workload if number == 0 else "", summary.server, *cells])
        if len(group) == 2:
            rows.append(["", "ratio", *(_number(ratio, 2) for ratio in ratios(*group).values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def json_lines(groups: Sequence[Sequence[Summary]]) -> str:
    """One object for each workload and server, and one with the ratios where there are two servers."""
    lines: list[str] = []
    for group in groups:
        lines += [json.dumps(dataclasses.asdict(summary)) for summary in group]
        if len(group) == 2:
            lines.append(json.dumps({"workload": group[0].workload, "ratio": ratios(*group)}))
    return "\n".join(lines)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"
