"""From ModelOptions to llama.cpp's model and context parameters. Nothing here loads a model."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from server.engine import rules
from server.engine.ggml import Device, Ggml
from server.engine.messages import DeviceInfo
from server.engine.native_enums import CACHE_TYPES, FLASH_ATTENTION, LOAD_MODES, NUMA, ROPE_SCALING, SPLIT_MODES
from server.engine.options import ModelOptions
from server.engine.threads import default_threads
from server.errors import ConfigError
from server.gguf import Header

__all__ = [
    "CACHE_TYPES",
    "FLASH_ATTENTION",
    "LOAD_MODES",
    "NUMA",
    "ROPE_SCALING",
    "SPLIT_MODES",
    "NativeParams",
    "build",
    "check",
    "n_sequences",
]

_EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
MIN_SHARED_SEQUENCES = 32
# Any override switches llama.cpp's pipeline parallelism off, also one that matches nothing (src/llama-context.cpp).
_NO_TENSOR = "^no tensor has this name$"


@dataclass(frozen=True, slots=True)
class NativeParams:
    """Ready for llama_model_load_from_file and llama_init_from_model. `keep_alive` owns the arrays they point to."""

    model: Any
    context: Any
    devices: list[Device]  # GPUs that the weights may go to
    warnings: list[str]
    keep_alive: list[object]


def build(bindings: ModuleType, ggml: Ggml, options: ModelOptions, header: Header) -> NativeParams:
    """Raises ConfigError when the options contradict each other, the model or the machine."""
    devices = _chosen_devices(ggml, options)
    warnings = _check(bindings, options, header, devices)
    keep_alive: list[object] = []
    model = _model_params(bindings, ggml, options, devices, keep_alive)
    return NativeParams(model, _context_params(bindings, options), devices, warnings, keep_alive)


def n_sequences(options: ModelOptions, *, can_cut: bool) -> int:
    """How many sequences the cache holds: more than slots where cells are shared, so that finished ones can stay, and
    one to move states through; each costs a row of logits. Separate streams and states that cannot be cut cost their
    memory each: one a slot."""
    if not options.kv_unified or not can_cut:
        return options.n_slots
    return min(rules.MAX_SEQUENCES, max(MIN_SHARED_SEQUENCES, 2 * options.n_slots) + 1)


def check(bindings: ModuleType, ggml: Ggml, options: ModelOptions, header: Header) -> list[DeviceInfo]:
    """The GPUs that the weights may go to, once the options are known to be possible. Raises ConfigError."""
    devices = _chosen_devices(ggml, options)
    _check(bindings, options, header, devices)
    return [device.info for device in devices]


def _check(bindings: ModuleType, options: ModelOptions, header: Header, devices: list[Device]) -> list[str]:
    rules.check(options, header, int(bindings.llama_max_parallel_sequences()))
    return rules.check_devices(options, header, [device.info.name for device in devices])


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chosen_devices(ggml: Ggml, options: ModelOptions) -> list[Device]:
    """The GPUs that --device names, or llama.cpp's own choice: all of them, integrated ones only if alone."""
    present = ggml.devices()
    if not options.devices:
        gpus = [device for device in present if device.info.kind == "gpu"]
        return gpus or [device for device in present if device.info.kind == "igpu"]
    if options.devices == ("none",):
        return []
    chosen = []
    for name in options.devices:
        device = ggml.device(name)
        if device is None or not device.is_gpu:
            usable = [device for device in present if device.is_gpu]
            raise ConfigError(f"--device '{name}' is not here; usable devices: {_names(usable)}")
        chosen.append(device)
    return chosen


def _names(devices: list[Device]) -> str:
    return ", ".join(device.info.name for device in devices) or "none"


def _tensor_overrides(ggml: Ggml, options: ModelOptions) -> list[tuple[str, int]]:
    """(regular expression, buffer type) in the order that llama.cpp tries them."""
    buffers = ggml.buffers()
    overrides = []
    for override in options.tensor_overrides:
        if override.buffer not in buffers:
            raise ConfigError(
                f"--override-tensor {override.pattern}={override.buffer}: no such buffer type; there are: "
                f"{', '.join(buffers)}"
            )
        overrides.append((override.pattern, buffers[override.buffer]))
    if options.cpu_moe:
        overrides.append((_EXPERT_TENSORS, ggml.cpu_buffer()))
    overrides += [(rf"blk\.{layer}{_EXPERT_TENSORS}", ggml.cpu_buffer()) for layer in range(options.n_cpu_moe)]
    if not options.pipeline and not overrides:
        overrides.append((_NO_TENSOR, ggml.cpu_buffer()))
    return overrides


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _TensorOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override; the bindings leave it out."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def _model_params(
    bindings: ModuleType, ggml: Ggml, options: ModelOptions, devices: list[Device], keep_alive: list[object]
) -> Any:
    params = bindings.llama_model_default_params()
    asked = options.n_gpu_layers
    params.n_gpu_layers = -1 if asked is None else asked
    params.split_mode = SPLIT_MODES[options.split_mode]
    params.load_mode = LOAD_MODES[options.load_mode]
    params.main_gpu = options.main_gpu
    params.check_tensors = options.check_tensors
    params.use_extra_bufts = options.use_extra_bufts
    params.no_host = options.no_host
    if options.devices:
        handles = (ctypes.c_void_p * (len(devices) + 1))(*(device.handle for device in devices), None)
        params.devices = ctypes.addressof(handles)
        keep_alive.append(handles)
    if options.tensor_split:
        n_max = int(bindings.llama_max_devices())
        shares = (ctypes.c_float * n_max)(*options.tensor_split[:n_max])
        params.tensor_split = shares
        keep_alive.append(shares)
    overrides = _tensor_overrides(ggml, options)
    if overrides:
        rows = [_TensorOverride(pattern.encode(), buffer) for pattern, buffer in overrides]
        array = (_TensorOverride * (len(rows) + 1))(*rows, _TensorOverride(None, None))
        params.tensor_buft_overrides = ctypes.addressof(array)
        keep_alive.append(array)
    return params


def _context_params(bindings: ModuleType, options: ModelOptions) -> Any:
    params = bindings.llama_context_default_params()
    n_threads = options.n_threads if options.n_threads > 0 else default_threads()
    params.n_ctx = options.n_ctx
    params.n_seq_max = options.n_slots
    params.kv_unified = options.kv_unified
    params.n_batch = options.n_batch
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    # the default is one row of logits per batch token: gigabytes that nobody reads
    params.n_outputs_max = options.n_slots
    params.n_threads = n_threads
    params.n_threads_batch = options.n_threads_batch if options.n_threads_batch > 0 else n_threads
    params.type_k = CACHE_TYPES[options.cache_type_k]
    params.type_v = CACHE_TYPES[options.cache_type_v]
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
    params.offload_kqv = options.offload_kqv
    params.op_offload = options.op_offload
    params.swa_full = False  # as llama.cpp's server
    if options.rope_scaling is not None:
        params.rope_scaling_type = ROPE_SCALING[options.rope_scaling]
    params.rope_freq_base = options.rope_freq_base
    params.rope_freq_scale = options.rope_freq_scale
    return params
