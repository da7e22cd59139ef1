"""From ModelOptions to llama.cpp's model and context parameters, and the checks that must fail before weights are read.

Every refusal names the flag, the value and the way out. Nothing here loads a model.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from server.engine.ggml import Device, Ggml
from server.engine.options import ModelOptions
from server.engine.threads import default_threads
from server.errors import ConfigError
from server.gguf import Header

SPLIT_MODES = {"none": 0, "layer": 1, "tensor": 3}  # enum llama_split_mode; "row" exists no more on CUDA
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}  # enum llama_load_mode
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type
NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}  # enum ggml_numa_strategy
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}  # enum llama_rope_scaling_type
CACHE_TYPES = {  # enum ggml_type; the ones a cache may have
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
_UNQUANTIZED = frozenset({"f32", "f16", "bf16"})
_EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DEFAULT_UBATCH = 512
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MIN_SHARED_SEQUENCES = 32
# llama.cpp's llm_arch_supports_sm_tensor (src/llama-arch.cpp) says no for these
_NO_TENSOR_SPLIT = frozenset(
    {
        "grok",
        "mpt",
        "plamo2",
        "minicpm3",
        "gemma3n",
        "mamba",
        "mamba2",
        "jamba",
        "falcon-h1",
        "olmo2",
        "olmoe",
        "deepseek2",
        "deepseek32",
        "hy_v4",
        "dots3note",
        "glm-dsa",
        "bitnet",
        "t5",
        "nemotron_h",
        "nemotron_h_moe",
        "granitehybrid",
        "minimax-01",
        "minimax-m2",
        "minimax-m3",
        "mistral4",
        "kimi-linear",
        "bailingmoe3",
        "kimi-k3",
        "glm5-next",
        "qwen3tts",
        "qwen4exp",
    }
)


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
    warnings = _check(options, header, devices, int(bindings.llama_max_parallel_sequences()))
    keep_alive: list[object] = []
    model = _model_params(bindings, ggml, options, devices, keep_alive)
    return NativeParams(model, _context_params(bindings, options), devices, warnings, keep_alive)


def n_sequences(options: ModelOptions, *, can_cut: bool) -> int:
    """How many sequences the cache holds: more than slots where cells are shared, so that finished ones can stay, and
    one to move states through; each costs a row of logits. Separate streams and states that cannot be cut cost their
    memory each: one a slot."""
    if not options.kv_unified or not can_cut:
        return options.n_slots
    return min(MAX_SEQUENCES, max(MIN_SHARED_SEQUENCES, 2 * options.n_slots) + 1)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check(options: ModelOptions, header: Header, gpus: list[Device], max_sequences: int) -> list[str]:
    _check_names(options)
    _check_sizes(options, max_sequences)
    _check_cache_types(options, header)
    return _check_devices(options, header, gpus)


def _check_names(options: ModelOptions) -> None:
    _one_of("--split-mode", options.split_mode, SPLIT_MODES)
    _one_of("--load-mode", options.load_mode, LOAD_MODES)
    _one_of("--flash-attn", options.flash_attn, FLASH_ATTENTION)
    _one_of("--cache-type-k", options.cache_type_k, CACHE_TYPES)
    _one_of("--cache-type-v", options.cache_type_v, CACHE_TYPES)
    if options.numa is not None:
        _one_of("--numa", options.numa, NUMA)
    if options.rope_scaling is not None:
        _one_of("--rope-scaling", options.rope_scaling, ROPE_SCALING)


def _one_of(flag: str, value: str, known: dict[str, int]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} '{value}' is not known; use one of: {', '.join(known)}")


def _check_sizes(options: ModelOptions, max_sequences: int) -> None:
    if not 1 <= options.n_slots <= max_sequences:
        raise ConfigError(f"--parallel {options.n_slots} is not possible: llama.cpp serves 1 to {max_sequences} slots")
    if options.n_batch < options.n_slots:
        raise ConfigError(
            f"--batch-size {options.n_batch} is smaller than --parallel {options.n_slots}: one step must hold a token "
            f"of every slot; raise --batch-size to {options.n_slots} or more"
        )
    # a default --ubatch-size beside a small --batch-size is no mistake; llama.cpp lowers it
    if options.n_ubatch > options.n_batch and options.n_ubatch != _DEFAULT_UBATCH:
        raise ConfigError(
            f"--ubatch-size {options.n_ubatch} is larger than --batch-size {options.n_batch}; lower the first or raise "
            f"the second"
        )
    if options.n_ubatch < 1:
        raise ConfigError(f"--ubatch-size {options.n_ubatch} is not possible; use 1 or more")


def _check_cache_types(options: ModelOptions, header: Header) -> None:
    type_k, type_v = options.cache_type_k, options.cache_type_v
    if type_k != type_v and _has_latent_cache(header):
        raise ConfigError(
            f"--cache-type-k {type_k} and --cache-type-v {type_v} differ, but '{header.architecture}' models keep one "
            f"latent for both; set both flags to the same type"
        )
    if type_v not in _UNQUANTIZED and options.flash_attn == "off":
        raise ConfigError(
            f"--cache-type-v {type_v} needs flash attention; use --flash-attn auto, or --cache-type-v f16"
        )
    if options.split_mode == "tensor":
        quantized = [name for name in (type_k, type_v) if name not in _UNQUANTIZED]
        if quantized:
            raise ConfigError(
                f"--split-mode tensor cannot use a {quantized[0]} cache; use --split-mode layer, or f16 for both "
                f"--cache-type-k and --cache-type-v"
            )
        if options.flash_attn == "off":
            raise ConfigError("--split-mode tensor needs flash attention; use --flash-attn auto or --split-mode layer")


def _has_latent_cache(header: Header) -> bool:
    """Multi-head latent attention: K and V are views of one tensor (llama_hparams::is_mla)."""
    return header.architecture == "deepseek4" or bool(header.integer(f"{header.architecture}.attention.key_length_mla"))


def check_that_the_cpu_is_meant(options: ModelOptions, has_gpus: bool, nvidia: str = "/dev/nvidia0") -> list[str]:
    """Nobody gets two tokens a second from a machine full of GPUs without being told: raises ConfigError where a flag
    asks for GPUs that llama.cpp does not see, warns where they are in the machine and no flag says anything."""
    asked = options.n_gpu_layers
    if has_gpus or asked == 0:
        return []
    ruled_out = options.devices == ("none",)
    if asked is None and (ruled_out or len(options.tensor_split) < 2):
        if not ruled_out and os.path.exists(nvidia):
            warning = "there are NVIDIA GPUs in this machine, but llama.cpp sees none, and the CPU computes"
            return [f"{warning}; `python -m server doctor` says why; --n-gpu-layers 0 says that it is meant"]
        return []
    flag = "--tensor-split" if asked is None else f"--n-gpu-layers {'all' if asked < 0 else asked}"
    raise ConfigError(
        f"{flag} asks for a GPU, but llama.cpp sees none here (`python -m server doctor` says why); use --n-gpu-layers "
        f"0 to run on the CPU, or install a llama-cpp-python built for your GPU"
    )


def _check_devices(options: ModelOptions, header: Header, gpus: list[Device]) -> list[str]:
    warnings = check_that_the_cpu_is_meant(options, bool(gpus))
    if options.split_mode == "tensor":
        if header.architecture in _NO_TENSOR_SPLIT:
            raise ConfigError(
                f"--split-mode tensor is not possible with '{header.architecture}' models in this llama.cpp; use "
                f"--split-mode layer"
            )
        if not gpus:
            raise ConfigError("--split-mode tensor needs a GPU, but llama.cpp sees none here; use --split-mode layer")
    if options.split_mode == "none" and gpus and options.main_gpu >= len(gpus):
        raise ConfigError(
            f"--main-gpu {options.main_gpu} does not exist; there are {len(gpus)} devices, counted from 0: "
            f"{_names(gpus)}"
        )
    if len(options.tensor_split) > len(gpus):
        shares = f"{len(options.tensor_split)} shares for {len(gpus)} GPUs"
        warnings.append(f"--tensor-split names {shares}; the rest has no effect")
    return warnings


def _names(devices: list[Device]) -> str:
    return ", ".join(device.info.name for device in devices) or "none"


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
