"""Bytes of the cache: rows of keys and values for each cell, states for each sequence. Exact, block by block."""

from __future__ import annotations

from server.fit.choice import Cells, ContextChoice
from server.fit.facts import Block, ModelShape

# type: values in a block, bytes of a block (ggml_row_size)
_ROW_BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "iq4_nl": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}
_WINDOW_PADDING = 256
_CUDA_ROW = 512  # MATRIX_ROW_PADDING
_CUDA_ALIGNMENT = 128
_STATE_BYTES = 4  # recurrent states are always f32


def row_bytes(type_: str, n_values: int) -> int:
    """Bytes of a row of `n_values`. Raises ValueError when the type's blocks do not divide it."""
    per_block, n_bytes = _ROW_BLOCKS[type_]
    if n_values % per_block:
        raise ValueError(f"a row of {n_values} values cannot be {type_}, whose blocks have {per_block}")
    return n_values // per_block * n_bytes


def cache_bytes(shape: ModelShape, block: Block, choice: ContextChoice, cells: Cells, *, on_cuda: bool = False) -> int:
    """What `block` keeps in the context that `choice` makes (llama_kv_cache, -_iswa, -_dsa, llama_memory_recurrent).
    CUDA fills up each quantised tensor whose rows are no multiple of 512 values, once."""
    kept = block.kept
    n_cells = window_cells(shape, choice, cells) if kept.in_window else cells.n_ctx_seq
    # without flash attention values lie transposed, and then all blocks have rows of the widest
    v_values = kept.v_values
    if v_values and not choice.flash_attn:
        v_values = max(each.kept.v_values for each in shape.blocks)
    per_cell = row_bytes(choice.cache_type_k, kept.k_values) + row_bytes(choice.cache_type_v, v_values)
    indexer = row_bytes(choice.cache_type_k, kept.indexer_values) * cells.n_ctx_seq
    states = kept.state_values * _STATE_BYTES * choice.n_sequences
    filling = 0
    if on_cuda:
        filling = _filling(choice.cache_type_k, kept.k_values) + _filling(choice.cache_type_v, v_values)
        filling += _filling(choice.cache_type_k, kept.indexer_values)
    return (per_cell * n_cells + indexer) * cells.n_streams + states + filling


def _filling(type_: str, n_values: int) -> int:
    """ggml_backend_cuda_buffer_type_get_alloc_size, in whole units of its alignment."""
    missing = -n_values % _CUDA_ROW
    if not missing or _ROW_BLOCKS[type_][0] == 1:
        return 0
    return -(-row_bytes(type_, missing) // _CUDA_ALIGNMENT) * _CUDA_ALIGNMENT


def window_cells(shape: ModelShape, choice: ContextChoice, cells: Cells) -> int:
    """Cells of a windowed block: the window for each sequence that shares the cache, and room for a batch."""
    if choice.swa_full:
        return cells.n_ctx_seq
    n_sharing = choice.n_sequences if choice.kv_unified else 1
    n_ubatch = min(choice.n_ctx or shape.n_ctx_train, choice.n_batch, choice.n_ubatch or choice.n_batch)
    n_wanted = min(cells.n_ctx_seq, shape.window * n_sharing + n_ubatch)
    return -(-n_wanted // _WINDOW_PADDING) * _WINDOW_PADDING


def bytes_per_token(shape: ModelShape, type_k: str, type_v: str) -> int:
    """Bytes of one cell over all blocks of the trunk; windowed blocks count as if they saw everything."""
    total = 0
    for block in shape.trunk:
        kept = block.kept
        total += row_bytes(type_k, kept.k_values) + row_bytes(type_v, kept.v_values)
        total += row_bytes(type_k, kept.indexer_values)
    return total
