"""A plan as people read it: a bar for each device, what is left, how far it could go, the flags to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from server.cli.plan_source import Candidate
from server.cli.tables import plain_table
from server.fit.advice import is_tight, shortage
from server.fit.cells import bytes_per_token
from server.fit.memory import DevicePlan, MemoryPlan, Part
from server.fit.placement import Box
from server.fit.report import SLOTS, Report
from server.fit.speed import examples
from server.fit.words import GIB, count, size, tokens

_BAR = 24
_PLENTY = 1 << 49
_SHOWN = (Part.WEIGHTS, Part.CACHE, Part.COMPUTE)


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    style: str = ""


def show(lines: Sequence[Line], out: TextIO) -> None:
    if not out.isatty():
        out.write("".join(f"{line.text}\n" for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, soft_wrap=True, highlight=False)
    for line in lines:
        console.print(Text(line.text, style=line.style))


def shown(candidate: Candidate, report: Report, *, explain: bool) -> list[Line]:
    """One model on one box."""
    plan = report.plan
    shape = plan.shape
    lines = [
        Line(f"{candidate.name}: {shape.architecture}, {count(shape.n_params)} parameters", "bold"),
        Line(f"{size(shape.weights_bytes)} of weights in {len(shape.trunk)} layers"),
        Line(_asked(plan)),
        Line(""),
        *_devices(report),
        Line(""),
        *_verdict(report),
    ]
    if explain:
        lines += [Line(""), Line("Every sum", "bold"), *_sums(plan)]
    if plan.fits or any(reach.n_ctx for reach in report.reaches):
        lines += [Line(""), *_grid(report)]
    if plan.fits:
        lines += [Line(""), Line("Flags", "bold"), Line(f"  {report.flags}")]
        lines += [Line(""), Line("Speed of one answer", "bold"), *_speed(report)]
    return lines


def compared(reports: Sequence[tuple[Candidate, Report]], box: Box) -> list[Line]:
    """The quants of a repository side by side."""
    rows = []
    for candidate, report in reports:
        plan = report.plan
        about = "about " if candidate.roughly else ""
        where = f"{plan.cells.n_ctx_seq:,}" if plan.fits else "-"
        moved = f"experts of {report.settled.n_cpu_moe} layers in RAM" if report.settled.n_cpu_moe else ""
        left = size(plan.fullest.room_bytes) if plan.fits else ""
        fits = ("yes, " + moved if moved else "yes") if plan.fits else "no"
        rows.append((candidate.name, size(plan.shape.file_bytes), about + fits, where, left))
    gpus = f"{len(box.devices)} GPUs of {size(box.devices[0].total_bytes)}" if box.devices else "the CPU"
    heads = ("quant", "size", f"fits {gpus}", "tokens for one request", "left on the fullest")
    table = plain_table(heads, rows)
    lines = [Line(table[0], "bold")]
    for text, (_, report) in zip(table[1:], reports, strict=True):
        lines.append(Line(text, "green" if report.plan.fits else "red"))
    note = "about: only one quant's headers were read; the others are taken to be larger or smaller in all parts alike"
    return [*lines, Line(""), Line(note), Line("plan OWNER/REPO:QUANT shows one of them exactly")]


def _asked(plan: MemoryPlan) -> str:
    choice = plan.choice
    each = bytes_per_token(plan.shape, choice.cache_type_k, choice.cache_type_v)
    slots = "1 slot" if choice.n_slots == 1 else f"{choice.n_slots} slots"
    how = "one cache for all" if choice.kv_unified and choice.n_slots > 1 else ""
    parts = [
        f"{slots}, {tokens(plan.cells.n_ctx_seq)} tokens for one request{' (' + how + ')' if how else ''}",
        f"{choice.cache_type_k} cache, {each:,} bytes a token",
        f"ubatch {choice.n_ubatch}",
    ]
    return "; ".join(parts)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _devices(report: Report) -> list[Line]:
    plan = report.plan
    heads = ("device", "blocks", "weights", "cache", "compute", "other", "needs", "of", "")
    rows = []
    for each, n_blocks in zip(plan.devices, report.settled.counts, strict=True):
        rows.append((each.device.name, str(n_blocks), *_cells(each)))
    on_host = plan.shape.n_blocks + 1 - report.settled.n_gpu_layers
    rows.append(("host", str(on_host) if on_host else "", *_cells(plan.host)))
    table = plain_table(heads, rows)
    everyone = (*plan.devices, plan.host)
    return [
        Line(table[0], "bold"),
        *(Line(text, _style(each)) for text, each in zip(table[1:], everyone, strict=True)),
    ]


def _cells(plan: DevicePlan) -> tuple[str, ...]:
    other = plan.needed_bytes - sum(plan.of(part) for part in _SHOWN)
    numbers = [plan.of(part) for part in _SHOWN]
    free = plan.device.free_bytes
    room = f"{free / GIB:.1f} GiB" if free < _PLENTY else "(any)"
    return (*(f"{n / GIB:.1f}" for n in (*numbers, other, plan.needed_bytes)), room, _bar(plan))


def _bar(plan: DevicePlan) -> str:
    free = plan.device.free_bytes
    if free >= _PLENTY:
        return ""
    share = plan.needed_bytes / free if free else 2.0
    filled = min(_BAR, round(share * _BAR))
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:4.0%}"


def _style(plan: DevicePlan) -> str:
    if plan.fits:
        return "green"
    return "yellow" if plan.needed_bytes <= plan.device.free_bytes else "red"


def _sums(plan: MemoryPlan) -> list[Line]:
    lines = []
    for each in (*plan.devices, plan.host):
        lines.append(Line(f"  {each.device.name}: {size(each.total_bytes)}"))
        lines += [Line(f"    {row.part.value:20} {row.n_bytes:>18,}  {row.why}") for row in each.rows]
    return lines


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _verdict(report: Report) -> list[Line]:
    plan, settled = report.plan, report.settled
    lines = [Line(f"changed to fit: {change}", "yellow") for change in settled.changes]
    for each in (plan, settled.other):
        if each is not None and (settled.other is not None or each.placement.pipelined):
            switch = "on " if each.placement.pipelined else "off"
            used = "  <- used" if each is plan else ""
            fits = "fits" if each.fits else "does not fit"
            lines.append(
                Line(f"--pipeline {switch}  {size(each.fullest.needed_bytes)} on the fullest GPU: {fits}{used}")
            )
    if plan.fits:
        fullest = plan.fullest
        left = size(fullest.room_bytes + fullest.of(Part.MARGIN))
        lines.append(Line(f"It fits: {left} stay free on {fullest.device.name}, the fullest.", "bold green"))
    elif is_tight(plan):
        lines.append(Line(f"It is tight: {shortage(plan)}; the server starts with a warning.", "bold yellow"))
    else:
        lines.append(Line(f"It does not fit: {shortage(plan)}.", "bold red"))
    if not plan.is_exact:
        lines.append(Line("The compute buffers of this architecture are an estimate.", "yellow"))
    if report.ways:
        lines += [Line("It would fit with"), *(Line(f"  {way}") for way in report.ways)]
    return lines


def _grid(report: Report) -> list[Line]:
    shared = report.plan.choice.kv_unified
    types = list(dict.fromkeys(reach.cache_type for reach in report.reaches))
    heads = ("cache", "slots", "most tokens each", *(_short(n) for n in report.contexts))
    rows = []
    for cache_type in types:
        for n_slots in SLOTS:
            reach = report.reach(cache_type, n_slots)
            marks = ["fits" if n <= reach.n_ctx_seq else "-" for n in report.contexts]
            rows.append((cache_type, str(n_slots), tokens(reach.n_ctx_seq) if reach.n_ctx else "-", *marks))
    title = "What if: tokens for each of so many requests at once"
    how = ", cells shared" if shared else ""
    return [Line(f"{title} (ubatch {report.plan.choice.n_ubatch}{how})", "bold"), *map(Line, plain_table(heads, rows))]


def _short(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"


def _speed(report: Report) -> list[Line]:
    if not report.speeds:
        return _unknown_speed(report)
    lines = []
    for speed in report.speeds:
        context = f"with {tokens(speed.n_tokens)} tokens in the context" if speed.n_tokens else "with an empty context"
        low, high = speed.expected
        lines.append(Line(f"  {context}: at most {speed.at_most:.0f} tokens a second = {speed.formula}"))
        lines.append(Line(f"    30 to 60 % of that is what such boxes were seen to reach: {low:.0f} to {high:.0f}"))
    return lines


def _unknown_speed(report: Report) -> list[Line]:
    lines = []
    for reading in report.readings:
        context = f"with {tokens(reading.n_tokens)} tokens in the context" if reading.n_tokens else "empty context"
        host = f" and {reading.on_host / 1e9:.1f} GB in the host" if reading.on_host else ""
        most = ", ".join(f"{name} at most {rate:.0f} a second" for name, rate in examples(reading))
        said = f": {most}" if most else ""
        lines.append(Line(f"  {context}: a token reads {reading.on_devices / 1e9:.1f} GB in GPUs{host}{said}"))
    way = "give --bandwidth GPU,HOST in GB/s, or name the GPUs: --devices 8xA100-80GB"
    return [*lines, Line(f"  30 to 60 % of that is what such boxes were seen to reach; {way}")]


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(reports: Sequence[tuple[Candidate, Report]], n_read: int) -> str:
    return json.dumps({"bytes_read": n_read, "plans": [_object(*each) for each in reports]}, indent=2)


def _object(candidate: Candidate, report: Report) -> dict[str, Any]:
    plan, settled = report.plan, report.settled
    return {
        "model": candidate.name,
        "architecture": plan.shape.architecture,
        "file_bytes": plan.shape.file_bytes,
        "fits": plan.fits,
        "tight": is_tight(plan),
        "exact": plan.is_exact and not candidate.roughly,
        "pipelined": plan.placement.pipelined,
        "n_ctx": plan.cells.n_ctx,
        "n_ctx_seq": plan.cells.n_ctx_seq,
        "n_slots": plan.choice.n_slots,
        "cache_type_k": plan.choice.cache_type_k,
        "cache_type_v": plan.choice.cache_type_v,
        "n_ubatch": plan.choice.n_ubatch,
        "n_gpu_layers": settled.n_gpu_layers,
        "n_cpu_moe": settled.n_cpu_moe,
        "tensor_split": settled.counts,
        "changes": [{"what": each.what, "before": each.before, "after": each.after} for each in settled.changes],
        "devices": [_device(each) for each in (*plan.devices, plan.host)],
        "other_pipeline": None if settled.other is None else [_device(each) for each in settled.other.devices],
        "largest_contexts": [
            {"cache_type": each.cache_type, "n_slots": each.n_slots, "n_ctx": each.n_ctx, "n_ctx_seq": each.n_ctx_seq}
            for each in report.reaches
        ],
        "ways_out": [{"flags": way.flags, "effect": way.effect} for way in report.ways],
        "speed": [
            {"n_tokens": each.n_tokens, "at_most": round(each.at_most, 2), "formula": each.formula}
            for each in report.speeds
        ],
        "flags": report.flags,
    }


def _device(plan: DevicePlan) -> dict[str, Any]:
    return {
        "device": plan.device.name,
        "free_bytes": plan.device.free_bytes if plan.device.free_bytes < _PLENTY else None,
        "needed_bytes": plan.needed_bytes,
        "total_bytes": plan.total_bytes,
        "rows": [{"part": row.part.value, "bytes": row.n_bytes, "why": row.why} for row in plan.rows],
    }
