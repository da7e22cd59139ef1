"""`python -m server doctor`: what this machine lacks to serve, before a model of 434 GiB is loaded to find out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.flag import Group
from server.cli.subcommand import Call, Spec, option
from server.cli.values import Switch

if TYPE_CHECKING:
    from server.cli.settings import Settings
    from server.ops.doctor.finding import Subject

SPEC = Spec(
    "doctor",
    "Look at this machine: driver, GPUs, memory, limits, disk, port. Takes the server's flags as well.",
    groups=(Group("Flags", (option("--json", Switch(), False, "findings as JSON"),)),),
    notes=(
        "python -m server doctor --gguf MODEL --n-gpu-layers all --port 8080 checks what that line needs.",
        "Exit code 1: something is to be mended; each line says how.",
    ),
    server_flags=True,
)


def run(call: Call) -> int:
    from server.cli.command import read_settings
    from server.ops.doctor.examine import as_json, examine, lines
    from server.ops.doctor.finding import Machine, Verdict

    findings = examine(Machine(), subject_of(read_settings(call.rest, call.environment)))
    print(as_json(findings) if call["json"] else "\n".join(lines(findings)))
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def subject_of(settings: Settings) -> Subject:
    from server.ops.doctor.finding import Subject

    layers, devices = settings["n-gpu-layers"], settings["device"] or ()
    asked: str | None = None
    if layers:
        asked = settings.setting("n-gpu-layers").where
    elif devices and "none" not in devices:
        asked = settings.setting("device").where
    elif settings["tensor-split"]:
        asked = settings.setting("tensor-split").where
    elif settings["split-mode"] == "tensor":
        asked = settings.setting("split-mode").where
    return Subject(
        model=settings["gguf"],
        hosts=settings["host"],
        port=settings["port"],
        gpu_flag=asked,
        no_gpus=layers == 0 or "none" in devices,
        locks_memory="mlock" in settings["load-mode"],
        numa=settings["numa"],
    )
