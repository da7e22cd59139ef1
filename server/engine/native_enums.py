"""llama.cpp's enums by the words that its command line has for their values. Source: include/llama.h, ggml.h."""

from __future__ import annotations

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
