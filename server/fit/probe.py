"""Ask llama.cpp itself: a child process loads the model without memory and tells what it would take.

The child is `python -m server.engine.dry_run`; this module knows its name and its JSON, not its code. A native abort
ends the child and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from server.errors import LoadError
from server.fit.choice import ContextChoice
from server.fit.memory import MemoryPlan, Part

COMMAND = (sys.executable, "-m", "server.engine.dry_run")
_TIMEOUT_S = 120.0


class DryBuffer(msgspec.Struct, frozen=True):
    """Bytes that one buffer type ("CUDA0", "CPU", "CUDA_Host") would hold."""

    name: str
    model: int
    context: int
    compute: int


class DryRun(msgspec.Struct, frozen=True):
    """llama.cpp's answer for one context; `error` is its reason when it refuses."""

    n_ctx: int = 0
    n_ctx_seq: int = 0
    pipelined: bool = False
    exact: bool = False  # False: told by the log, in steps of 0.01 MiB
    buffers: tuple[DryBuffer, ...] = ()
    error: str = ""

    def of(self, name: str) -> DryBuffer:
        return next((buffer for buffer in self.buffers if buffer.name == name), DryBuffer(name, 0, 0, 0))

    def host(self, devices: Sequence[str]) -> DryBuffer:
        """All buffers that are on none of the `devices`."""
        others = [buffer for buffer in self.buffers if buffer.name not in devices]
        return DryBuffer(
            "host",
            sum(buffer.model for buffer in others),
            sum(buffer.context for buffer in others),
            sum(buffer.compute for buffer in others),
        )

    def compute(self, devices: Sequence[str]) -> tuple[int, ...]:
        """As server.fit.compute.compute_bytes gives it: each device's, then the host's."""
        return (*(self.of(name).compute for name in devices), self.host(devices).compute)


class _Report(msgspec.Struct, frozen=True):
    contexts: tuple[DryRun, ...] = ()
    error: str = ""


def dry_run(
    model: Mapping[str, object],
    choices: Sequence[ContextChoice],
    *,
    load_mtp: bool = False,
    draft: bool = False,
    backends: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    timeout_s: float = _TIMEOUT_S,
) -> tuple[DryRun, ...]:
    """One answer for each of `choices`. `model` are the engine's ModelOptions as plain values, `path` at least; `draft`
    asks for the contexts that draft; `backends` are backend libraries to load first. Raises LoadError when llama.cpp
    refuses the model, dies or does not answer in time."""
    request = {
        "model": dict(model),
        "contexts": [_context(choice, draft) for choice in choices],
        "load_mtp": load_mtp or draft,
        "backends": list(backends),
    }
    report = msgspec.json.decode(_ask(msgspec.json.encode(request), command, environment, timeout_s), type=_Report)
    if report.error:
        raise LoadError(f"llama.cpp would not load the model: {report.error}")
    return report.contexts


def differences(plan: MemoryPlan, run: DryRun) -> list[tuple[str, Part, int, int]]:
    """(device, part, planned bytes, bytes told) wherever the two differ."""
    names = [each.device.name for each in plan.devices]
    told = [(each, run.of(each.device.name)) for each in plan.devices] + [(plan.host, run.host(names))]
    parts = ((Part.CACHE, "context"), (Part.COMPUTE, "compute"))
    return [
        (each.device.name, part, each.of(part), getattr(buffer, field))
        for each, buffer in told
        for part, field in parts
        if each.of(part) != getattr(buffer, field)
    ]


def _context(choice: ContextChoice, draft: bool) -> dict[str, object]:
    return {
        "n_ctx": choice.n_ctx,
        "n_slots": choice.n_slots,
        "n_seq_max": choice.n_sequences,
        "n_batch": choice.n_batch,
        "n_ubatch": choice.n_ubatch,
        "n_outputs_max": choice.n_outputs,
        "kv_unified": choice.kv_unified,
        "cache_type_k": choice.cache_type_k,
        "cache_type_v": choice.cache_type_v,
        "flash_attn": "on" if choice.flash_attn else "off",
        "swa_full": choice.swa_full,
        "mtp": draft,
    }


def _ask(request: bytes, command: Sequence[str], environment: Mapping[str, str] | None, timeout_s: float) -> bytes:
    # without it an abort waits for a debugger that prints every thread's stack
    surroundings = os.environ | {"GGML_NO_BACKTRACE": "1"} | dict(environment or {})
    try:
        answer = subprocess.run(
            list(command), input=request, capture_output=True, env=surroundings, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise LoadError(f"llama.cpp's dry run did not end within {timeout_s:.0f} s; plan without it") from None
    if answer.returncode:
        lines = answer.stderr.decode("utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it said nothing"
        raise LoadError(f"llama.cpp's dry run died (status {answer.returncode}): {last}; plan without it")
    return answer.stdout
