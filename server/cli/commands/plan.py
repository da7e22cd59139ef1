"""python -m server plan: does it fit, with how much context, for how many, and how fast? Before a byte is loaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from server.cli.devices_value import Bandwidths, MemorySize, PlannedDevice, PlannedDevices
from server.cli.flag import Group
from server.cli.subcommand import Call, Place, Spec, option
from server.cli.values import Switch

if TYPE_CHECKING:
    from server.cli.settings import Settings
    from server.fit.placement import Box

SPEC = Spec(
    "plan",
    "Does a model fit, where do its layers go, how much context can there be? Takes the server's flags.",
    places=(Place("MODEL", "a path, or a name at the hub, of which only headers are read", required=False),),
    groups=(
        Group(
            "Flags",
            (
                option("--devices", PlannedDevices(), None, "GPUs to plan for: 8x80GiB, 8xA100 (default: this box)"),
                option("--ram", MemorySize(), None, "memory of the host (with --devices: as much as need be)"),
                option("--bandwidth", Bandwidths(), None, "measured GB/s of a GPU, and of the host"),
                option("--explain", Switch(), False, "show every sum"),
                option("--json", Switch(), False, "the plan as JSON"),
            ),
        ),
    ),
    notes=(
        "python -m server plan MODEL --devices 8x80GiB --parallel 2 --ctx-size 131072",
        "A repository without a quant shows all its quants side by side. Exit code 1: it does not fit.",
    ),
    server_flags=True,
)

_PLENTY = 1 << 50


def run(call: Call) -> int:
    from server.cli.build import engine_options
    from server.cli.command import read_settings
    from server.cli.plan_source import candidates
    from server.cli.plan_view import Line, as_json, compared, show, shown
    from server.engine import rules
    from server.errors import ConfigError
    from server.fit.placement import Planner
    from server.fit.report import report
    from server.planning import wish_of

    rest = list(call.rest)
    asked = rest.pop(0) if rest and not rest[0].startswith("-") else None
    settings = read_settings(rest, call.environment)
    found, n_read = candidates(settings, asked)
    box = _box(call["devices"], call["ram"], settings)
    gpu_rate, host_rate = call["bandwidth"] or (None, None)
    reports = []
    for each in found:
        engine = engine_options(settings, each.name)
        rules.check(engine.model, each.header)
        if engine.model.split_mode == "tensor":
            raise ConfigError(
                "--split-mode tensor cuts through every tensor and is not planned; plan --split-mode layer"
            )
        wish = wish_of(engine, each.shape, on_cuda=any(device.is_cuda for device in box.devices))
        planner = Planner(each.shape, box)
        reports.append((each, report(planner, wish, device_bandwidth=gpu_rate, host_bandwidth=host_rate)))
    if call["json"]:
        print(as_json(reports, n_read))
    else:
        lines = [Line(f"warning: {warning}", "yellow") for warning in settings.warnings]
        lines += compared(reports, box) if len(reports) > 1 else shown(*reports[0], explain=call["explain"])
        show(lines, sys.stdout)
    return int(not any(each.plan.fits for _, each in reports))


def _box(devices: tuple[PlannedDevice, ...] | None, ram: int | None, settings: Settings) -> Box:
    from server.fit.choice import Device
    from server.fit.placement import Box
    from server.planning import box_of

    if devices is None:
        from server.cli.build import engine_options
        from server.engine.ggml import list_devices

        here = box_of(list_devices(settings["rpc"] or ()), engine_options(settings, ""))
        host = here.host if ram is None else Device("host", ram, ram, kind="cpu", is_cuda=False)
        return Box(here.devices, host)
    size = _PLENTY if ram is None else ram
    gpus = tuple(
        Device(f"GPU{number}", device.n_bytes, device.n_bytes, description=device.name)
        for number, device in enumerate(devices)
    )
    return Box(gpus, Device("host", size, size, kind="cpu", is_cuda=False))
