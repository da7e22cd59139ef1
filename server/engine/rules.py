"""What llama.cpp would refuse, or abort over, minutes into a load: refused before it, from the options and the model's
header alone. Every refusal names the flag, the value and the way out.

`check` needs no library, so the command line asks it before it starts anything; `check_devices` needs to know the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from server.engine.native_enums import CACHE_TYPES, FLASH_ATTENTION, LOAD_MODES, NUMA, ROPE_SCALING, SPLIT_MODES
from server.engine.options import ModelOptions
from server.errors import ConfigError
from server.gguf import Header

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ (src/llama-cparams.h)
UNQUANTIZED = frozenset({"f32", "f16", "bf16"})
BLOCK_VALUES = 32  # in a block of every quantised cache type
_DEFAULT_UBATCH = 512
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


def check(options: ModelOptions, header: Header, max_sequences: int = MAX_SEQUENCES) -> None:
    """Raises ConfigError for options that contradict each other or the model."""
    _check_names(options)
    _check_sizes(options, max_sequences)
    _check_cache_types(options, header)
    _check_head_sizes(options, header)
    _check_tensor_split(options, header)


def check_devices(options: ModelOptions, header: Header, gpus: Sequence[str]) -> list[str]:
    """The rules about GPUs, by name in llama.cpp's order; warnings. Raises ConfigError."""
    warnings = check_that_the_cpu_is_meant(options, bool(gpus))
    if options.split_mode == "tensor" and not gpus:
        raise ConfigError("--split-mode tensor needs a GPU, but llama.cpp sees none here; use --split-mode layer")
    if options.split_mode == "none" and gpus and options.main_gpu >= len(gpus):
        raise ConfigError(
            f"--main-gpu {options.main_gpu} does not exist; there are {len(gpus)} devices, counted from 0: "
            f"{', '.join(gpus)}"
        )
    if len(options.tensor_split) > len(gpus):
        shares = f"{len(options.tensor_split)} shares for {len(gpus)} GPUs"
        warnings.append(f"--tensor-split names {shares}; the rest has no effect")
    return warnings


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


def has_latent_cache(header: Header) -> bool:
    """Multi-head latent attention: K and V are views of one tensor (llama_hparams::is_mla)."""
    return header.architecture == "deepseek4" or bool(header.integer(f"{header.architecture}.attention.key_length_mla"))


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


def _one_of(flag: str, value: str, known: Mapping[str, int]) -> None:
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
    if type_k != type_v and has_latent_cache(header):
        flag, to = ("-v", type_k) if type_k != "f16" else ("-k", type_v)
        raise ConfigError(
            f"--cache-type-k {type_k} and --cache-type-v {type_v} differ, but '{header.architecture}' models keep one "
            f"latent for both; set both flags to the same type: give --cache-type{flag} {to}"
        )
    if type_v not in UNQUANTIZED and options.flash_attn == "off":
        raise ConfigError(
            f"--cache-type-v {type_v} needs flash attention, and --flash-attn is off; use --flash-attn auto, or "
            f"--cache-type-v f16"
        )


def _check_head_sizes(options: ModelOptions, header: Header) -> None:
    """A quantised cache is read by whole blocks: of a head with flash attention, of a row of all heads without, where
    llama.cpp does not refuse but abort."""
    for letter, name, cache_type in (("k", "key", options.cache_type_k), ("v", "value", options.cache_type_v)):
        size = _head_size(header, name)
        width = size
        if options.flash_attn == "off":
            width *= header.integer(f"{header.architecture}.attention.head_count_kv") or 0
        if cache_type not in UNQUANTIZED and width % BLOCK_VALUES:
            raise ConfigError(
                f"--cache-type-{letter} {cache_type} keeps blocks of {BLOCK_VALUES} values, which do not divide this "
                f"model's {name} heads of {size}; use --cache-type-{letter} f16"
            )


def _head_size(header: Header, name: str) -> int:
    """Values in a head of the cache; 0 where the header does not say."""
    architecture = header.architecture
    given = header.integer(f"{architecture}.attention.{name}_length")
    if given is not None:
        return given
    n_embd = header.integer(f"{architecture}.embedding_length")
    n_head = header.integer(f"{architecture}.attention.head_count")
    return n_embd // n_head if n_embd and n_head else 0


def _check_tensor_split(options: ModelOptions, header: Header) -> None:
    if options.split_mode != "tensor":
        return
    if header.architecture in _NO_TENSOR_SPLIT:
        raise ConfigError(
            f"--split-mode tensor is not possible with '{header.architecture}' models in this llama.cpp; use "
            f"--split-mode layer"
        )
    quantized = [name for name in (options.cache_type_k, options.cache_type_v) if name not in UNQUANTIZED]
    if quantized:
        raise ConfigError(
            f"--split-mode tensor cannot use a {quantized[0]} cache; use --split-mode layer, or f16 for both "
            f"--cache-type-k and --cache-type-v"
        )
    if options.flash_attn == "off":
        raise ConfigError("--split-mode tensor needs flash attention; use --flash-attn auto or --split-mode layer")
