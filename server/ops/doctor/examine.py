"""All checks in order, and how their findings are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.ops.doctor import gpus, host, model
from server.ops.doctor.finding import Finding, Machine, Subject, Verdict

_WIDTH = 16


def examine(machine: Machine, subject: Subject) -> list[Finding]:
    findings = [*host.check_python(), *host.check_packages()]
    found = gpus.check_gpus(machine, subject)
    if not any(finding.check == "llama.cpp" for finding in found):
        found += gpus.check_llama(machine, subject)
    findings += found
    findings += host.check_memory(machine, subject)
    findings += host.check_numa(machine, subject)
    findings += host.check_shm(machine)
    findings += host.check_limits(subject)
    findings += model.check_model(subject)
    findings += host.check_port(subject)
    return findings


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, and below those that are not well the way out."""
    shown = []
    for finding in findings:
        shown.append(f"{finding.verdict.value:<5} {finding.check:<{_WIDTH}} {finding.found}")
        if finding.way_out:
            shown.append(f"{'':<6}{'':<{_WIDTH}} → {finding.way_out}")
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    shown.append(f"{counts[Verdict.OK]} ok, {counts[Verdict.WARN]} to look at, {counts[Verdict.FAIL]} to mend")
    return shown


def as_json(findings: Sequence[Finding]) -> str:
    record = {
        "fit": not any(finding.verdict is Verdict.FAIL for finding in findings),
        "findings": [
            {"check": each.check, "verdict": each.verdict.value, "found": each.found, "way_out": each.way_out or None}
            for each in findings
        ],
    }
    return json.dumps(record, indent=1, ensure_ascii=False)
