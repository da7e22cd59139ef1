"""The plan before a load: what the engine is asked for meets the memory that is there.

Runs in the engine process, once llama.cpp has named the devices and before a byte of weights is read. `plan_load` is
the entry there; `python -m server plan` uses the parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from server.engine.messages import DeviceInfo
from server.engine.native_params import n_sequences
from server.engine.options import EngineOptions, LoadPlan, ModelOptions
from server.errors import LoadError
from server.fit.advice import asked, is_tight, needs, refusal, shortage
from server.fit.choice import ContextChoice, Device
from server.fit.facts import ModelShape, read_shape
from server.fit.machine import choose_load_mode, host_memory
from server.fit.memory import DevicePlan, MemoryPlan, Part, Reserves
from server.fit.placement import Box, Planner, Settled, Wish
from server.fit.words import size
from server.gguf import read_header

_ALL = 1 << 20  # blocks: more than any model has
_MIB = 1 << 20
_LIKE_CUDA = ("CUDA", "ROCm", "MUSA")
# what llama.cpp's breakdown does not count
_NOT_NATIVE = (Part.OVERHEAD, Part.MARGIN, Part.HOST_CACHE, Part.OUTPUT)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def plan_load(options: EngineOptions, devices: Sequence[DeviceInfo]) -> LoadPlan:
    """Settle what the operator left open, or refuse. `devices` are those that may be used, and the CPU.
    Raises LoadError with the numbers and the ways out, ModelFileError for a damaged shard."""
    model = options.model
    if model.split_mode == "tensor":
        return LoadPlan(model, lines=["no plan: --split-mode tensor cuts through every tensor, which is not planned"])
    paths = shard_paths(model.path)
    shape = read_shape([read_header(path) for path in paths])
    box = box_of(devices, options)
    wish = wish_of(options, shape, on_cuda=any(device.is_cuda for device in box.devices))
    planner = Planner(shape, box)
    settled = planner.settle(wish)
    plan = settled.plan
    warnings = [f"--fit changed {change}" for change in settled.changes]
    if not plan.fits:
        if is_tight(plan):
            warnings.append(f"memory is tight: {shortage(plan)}, and {size(_margin(plan))} should stay free")
        elif not plan.is_exact:
            warnings.append(f"memory may not suffice, by an estimate for '{shape.architecture}': {shortage(plan)}")
        elif options.fit.adapts:
            raise LoadError(refusal(planner, wish, plan))
        else:
            warnings.append(f"memory does not suffice (--fit off, so it is tried): {shortage(plan)}")
    return LoadPlan(
        _settled_options(model, options, settled, paths),
        planned_bytes={each.device.name: _native_bytes(each) for each in (*plan.devices, plan.host)},
        lines=describe(settled),
        warnings=warnings,
    )


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def shard_paths(first: str) -> list[str]:
    """All shards of a set by the names that llama.cpp expects; `first` alone where it is no set."""
    match = _SHARD.search(first)
    if not match:
        return [first]
    stem, count = first[: match.start()], int(match[2])
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def wish_of(options: EngineOptions, shape: ModelShape, *, on_cuda: bool) -> Wish:
    """`on_cuda`: devices of that kind take memory for a context of their own."""
    model, fit = options.model, options.fit
    given = {"cache_type" if name.startswith("cache_type") else name for name in fit.given}
    experts: int | None = None if fit.experts else model.n_cpu_moe
    return Wish(
        choice=choice_of(model, shape),
        given=frozenset(given),
        n_gpu_layers=model.n_gpu_layers,
        split_mode=model.split_mode,
        tensor_split=model.tensor_split,
        main_gpu=model.main_gpu,
        n_cpu_moe=_ALL if model.cpu_moe else experts,
        pipeline=fit.pipeline,
        overrides=tuple((each.pattern, each.buffer) for each in model.tensor_overrides),
        adapts=fit.adapts,
        least_ctx=min(fit.least_ctx, shape.n_ctx_train or fit.least_ctx),
        reserves=reserves_of(fit.margin_bytes, on_cuda=on_cuda),
    )


def choice_of(model: ModelOptions, shape: ModelShape) -> ContextChoice:
    can_cut = not shape.is_recurrent and not shape.window
    return ContextChoice(
        n_ctx=model.n_ctx,
        n_slots=model.n_slots,
        n_seq_max=n_sequences(model, can_cut=can_cut),
        kv_unified=model.kv_unified,
        n_batch=model.n_batch,
        n_ubatch=min(model.n_ubatch, model.n_batch),
        cache_type_k=model.cache_type_k,
        cache_type_v=model.cache_type_v,
        flash_attn=model.flash_attn != "off",
        offload_kqv=model.offload_kqv,
    )


def reserves_of(margins: Sequence[int], *, on_cuda: bool) -> Reserves:
    """One margin for all devices is a row of its own; several are taken off each device's memory (`box_of`)."""
    margin = margins[0] if len(margins) == 1 else 0
    overhead = Reserves().device_overhead if on_cuda else 0
    return Reserves(device_margin=margin, device_overhead=overhead, host_overhead=256 * _MIB, host_margin=256 * _MIB)


def box_of(devices: Sequence[DeviceInfo], options: EngineOptions) -> Box:
    margins = options.fit.margin_bytes
    gpus = [device for device in devices if device.kind in ("gpu", "igpu")]
    extra = [*margins, *[margins[-1]] * len(gpus)] if len(margins) > 1 else [0] * len(gpus)
    return Box(
        tuple(
            Device(
                info.name,
                info.total_bytes,
                max(0, info.free_bytes - held),
                kind=info.kind,
                description=info.description,
                is_cuda=info.name.startswith(_LIKE_CUDA),
            )
            for info, held in zip(gpus, extra, strict=False)
        ),
        host_memory(),
    )


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _settled_options(model: ModelOptions, options: EngineOptions, settled: Settled, paths: list[str]) -> ModelOptions:
    plan = settled.plan
    choice, placement = plan.choice, plan.placement
    changed: dict[str, object] = {
        "n_ctx": choice.n_ctx,
        "n_slots": choice.n_slots,
        "n_ubatch": choice.n_ubatch,
        "cache_type_k": choice.cache_type_k,
        "cache_type_v": choice.cache_type_v,
    }
    if placement.devices:
        if any(home is None for home in placement.blocks):
            changed["n_gpu_layers"] = settled.n_gpu_layers
        if not model.cpu_moe:
            changed["n_cpu_moe"] = settled.n_cpu_moe
        if len(placement.devices) > 1 and not model.tensor_split:
            changed["tensor_split"] = tuple(float(count) for count in settled.counts)
        changed["pipeline"] = placement.pipelined
    if model.load_mode == "auto":
        on_gpus = sum(each.of(Part.WEIGHTS) for each in plan.devices)
        on_host = plan.host.of(Part.WEIGHTS)
        free = plan.host.device.free_bytes
        changed["load_mode"], _ = choose_load_mode(paths, on_gpus=on_gpus, on_host=on_host, available=free)
    return msgspec.structs.replace(model, **changed)


def describe(settled: Settled) -> list[str]:
    """The plan in lines for the log."""
    plan = settled.plan
    lines = [f"plan: {asked(plan)}"]
    if not plan.devices:
        return [*lines, f"plan: on the CPU, which {needs(plan.host)}; {size(plan.host.device.free_bytes)} are free"]
    counts = ",".join(str(count) for count in settled.counts)
    where = f"blocks {counts} on {len(plan.devices)} devices" if len(plan.devices) > 1 else plan.devices[0].device.name
    if settled.n_cpu_moe:
        where += f", experts of {settled.n_cpu_moe} layers in host memory"
    fullest = plan.fullest
    lines.append(f"plan: {where}; {fullest.device.name} {needs(fullest)} of {size(fullest.device.free_bytes)} free")
    if settled.other is not None:
        names = ("on", "off") if plan.placement.pipelined else ("off", "on")
        other = settled.other.fullest
        lines.append(
            f"plan: pipeline {names[0]}; with it {names[1]} {other.device.name} would need {size(other.needed_bytes)}"
        )
    return lines


def _margin(plan: MemoryPlan) -> int:
    return max(each.of(Part.MARGIN) for each in (*plan.devices, plan.host))


def _native_bytes(plan: DevicePlan) -> int:
    """What llama.cpp's own breakdown will say."""
    return plan.total_bytes - sum(plan.of(part) for part in _NOT_NATIVE)
