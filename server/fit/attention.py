"""What every block keeps of the tokens it has seen: the widths behind llama.cpp's cache, for all kinds of attention.

The rules are those of llama_model::create_memory and of load_arch_hparams (src/llama-model.cpp, src/models/*.cpp):

* plain and grouped attention: a row of keys and a row of values for each token, key_length x head_count_kv wide;
* latent attention (MLA): one row, key_length wide; the values are a view of it;
* a sparse indexer (DSA): one more row of keys, on the blocks that have an indexer of their own;
* a sliding window: the same rows, but for as many tokens as the window sees;
* recurrent blocks: a state for each sequence, whatever its length, always in 32-bit floats;
* NextN blocks: rows of their own, in the context that drafts, never in the trunk's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from server.fit.metadata import Metadata

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
# a block without key heads is a recurrent one
_HYBRID_BY_HEADS = frozenset(
    {"jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"}
)
# every block is recurrent but each N-th, or an array says which
_HYBRID_BY_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_NEMOTRON = frozenset({"nemotron_h", "nemotron_h_moe"})
_INDEXED = frozenset({"glm-dsa", "deepseek32", "glm5-next", "hy_v4", "qwen4exp"})
_LATENT_VALUES = frozenset({"glm5-next", "kimi-k3"})
# architecture: period of the pattern, and whether a period begins with the block that sees all (set_swa_pattern)
_WINDOW_PERIODS = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
_WINDOW_BY_ARRAY = frozenset({"gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35"})
_FIXED_WINDOWS = {"exaone4": 4096, "llama4": 8192, "smallthinker": 4096}
# caches of a kind of their own, and blocks that are passed more than once
_NOT_COVERED = frozenset({"deepseek4", "dflash", "dots3note", "minimax-m3", "nanbeige", "gemma4-assistant"})


@dataclass(frozen=True, slots=True)
class Kept:
    """Widths in values. Zero: the block keeps nothing of that kind."""

    k_values: int = 0  # a cell's row of keys
    v_values: int = 0  # a cell's row of values; 0 with latent attention
    indexer_values: int = 0  # a cell's row of indexer keys
    in_window: bool = False
    state_values: int = 0  # 32-bit floats for each sequence


def kept_of_blocks(data: Metadata) -> tuple[list[Kept], bool]:
    """What each block keeps, NextN blocks too; False beside it when the architecture's cache is not covered."""
    recurrent = _recurrent(data)
    window = _windowed(data, recurrent)
    shared_from = _shared_from(data)
    kept = []
    for index in range(data.n_blocks):
        rows = Kept() if index >= shared_from else _rows(data, index, window[index], recurrent[index])
        state = _state_values(data) if recurrent[index] else 0
        kept.append(replace(rows, state_values=state, indexer_values=_indexer_values(data, index, recurrent[index])))
    return kept, data.architecture not in _NOT_COVERED


def _rows(data: Metadata, index: int, in_window: bool, recurrent: bool) -> Kept:
    if recurrent and data.architecture != "falcon-h1":
        return Kept()
    if data.architecture in _NEMOTRON and data.per_block("feed_forward_length")[index]:
        return Kept()
    n_heads = data.n_head_kv[index]
    head_k, head_v = data.head_k, data.head_v
    if data.architecture in _LATENT_VALUES:
        head_v = data.integer("attention.kv_lora_rank")
    if in_window:
        head_k = data.integer("attention.key_length_swa", head_k)
        head_v = data.integer("attention.value_length_swa", head_v)
    latent = bool(data.integer("attention.key_length_mla"))
    return Kept(k_values=head_k * n_heads, v_values=0 if latent else head_v * n_heads, in_window=in_window)


def _indexer_values(data: Metadata, index: int, recurrent: bool) -> int:
    is_nextn = index >= data.n_blocks - data.n_nextn
    if data.architecture not in _INDEXED or recurrent or (is_nextn and data.architecture != "glm5-next"):
        return 0
    full = True if is_nextn else _full_indexers(data)[index]
    if not full or (data.architecture == "hy_v4" and not data.integer("attention.indexer.top_k")):
        return 0
    # GLM-5.3-Flash pools its keys and keeps key, gate and pooled value of each
    return data.integer("attention.indexer.key_length") * (3 if data.integer("attention.indexer.kpool") else 1)


def _full_indexers(data: Metadata) -> tuple[bool, ...]:
    """Which blocks of the trunk have an indexer of their own; the others use the choice of the last one before them."""
    told = data.array("attention.indexer.types")
    if told is not None:
        return tuple(bool(value) for value in (told + (0,) * data.n_blocks)[: data.n_blocks])
    if data.architecture == "glm-dsa" and data.integer("context_length") >= 1_048_576:
        # GLM-5.2: blocks 0, 1 and then each fourth from block 2 on
        return tuple(index < 2 or index % 4 == 2 for index in range(data.n_blocks))
    return (True,) * data.n_blocks


def _recurrent(data: Metadata) -> tuple[bool, ...]:
    n_trunk = data.n_blocks - data.n_nextn
    architecture = data.architecture
    if architecture in _RECURRENT or architecture == "falcon-h1":
        return (True,) * data.n_blocks
    if architecture in _HYBRID_BY_HEADS:
        return tuple(heads == 0 for heads in data.n_head_kv)
    if architecture in _NEMOTRON:
        widths = data.per_block("feed_forward_length")
        return tuple(
            index < n_trunk and heads == 0 and width == 0
            for index, (heads, width) in enumerate(zip(data.n_head_kv, widths, strict=True))
        )
    if architecture in _HYBRID_BY_INTERVAL:
        told = data.array("attention.recurrent_layers")
        if told is not None:
            return tuple(bool(value) for value in (told + (0,) * data.n_blocks)[: data.n_blocks])
        interval = data.integer("full_attention_interval", _HYBRID_BY_INTERVAL[architecture]) or 1
        return tuple(index < n_trunk and (index + 1) % interval != 0 for index in range(data.n_blocks))
    return (False,) * data.n_blocks


def _windowed(data: Metadata, recurrent: tuple[bool, ...]) -> tuple[bool, ...]:
    none = (False,) * data.n_blocks
    architecture, n_trunk = data.architecture, data.n_blocks - data.n_nextn
    if not _uses_window(data):
        return none
    if architecture in ("lfm2", "lfm2moe"):
        return tuple(index < n_trunk and not state for index, state in enumerate(recurrent))
    told = data.array("attention.sliding_window_pattern")
    if told is not None:
        return tuple(bool(value) for value in (told + (0,) * data.n_blocks)[: data.n_blocks])
    if architecture in _WINDOW_BY_ARRAY:
        return none
    period, dense_first = _WINDOW_PERIODS[architecture]
    period = data.integer("attention.sliding_window_pattern", period)
    sees_all = 0 if dense_first else period - 1
    return tuple(index < n_trunk and (period == 0 or index % period != sees_all) for index in range(data.n_blocks))


def _uses_window(data: Metadata) -> bool:
    architecture = data.architecture
    if architecture == "llama4":  # a window of zero says that there is none
        return data.window > 0 or not data.has("attention.sliding_window")
    if architecture == "exaone4":
        return data.n_blocks - data.n_nextn == 64
    return (
        architecture in _WINDOW_PERIODS or architecture in _WINDOW_BY_ARRAY or architecture.startswith("lfm2")
    ) and (data.window > 0)


def window_tokens(data: Metadata) -> int:
    """Tokens that a windowed block sees back."""
    if data.architecture == "llama4":
        return _FIXED_WINDOWS["llama4"]
    return data.window or _FIXED_WINDOWS.get(data.architecture, 0)


def _shared_from(data: Metadata) -> int:
    """The first block that has no rows of its own and uses those of an earlier one."""
    if data.architecture == "gemma3n":
        return 20
    if data.architecture == "gemma4":
        return data.n_blocks - data.integer("attention.shared_kv_layers")
    return data.n_blocks


def _state_values(data: Metadata) -> int:
    """n_embd_r + n_embd_s of src/llama-hparams.cpp: the convolution's history and the state."""
    n_embd = data.integer("embedding_length")
    n_head = max(data.per_block("attention.head_count"))
    wkv = data.integer("wkv.head_size")
    if wkv:
        return data.integer("token_shift_count", 2) * n_embd + n_embd * wkv
    short = data.integer("shortconv.l_cache")
    if short:
        return n_embd * (short - 1)
    kernel = data.integer("ssm.conv_kernel")
    kda = data.integer("kda.head_dim")
    if kda:
        return 3 * (kernel - 1 if kernel else 3) * n_head * kda + kda * kda * n_head
    if data.architecture == "minimax-01":
        return data.head_k * data.head_k * n_head
    inner, state = data.integer("ssm.inner_size"), data.integer("ssm.state_size")
    history = (kernel - 1 if kernel else 0) * (inner + 2 * data.integer("ssm.group_count") * state)
    return history + state * inner
