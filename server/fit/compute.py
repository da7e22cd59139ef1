"""Bytes of the compute buffers: the model's graph for one batch, scheduled over a placement."""

from __future__ import annotations

from server.fit.architectures import Builder, Homes
from server.fit.choice import ContextChoice, Placement
from server.fit.facts import ModelShape
from server.fit.graph import Graph
from server.fit.representatives import all_of, representatives
from server.fit.schedule import buffer_sizes

_EXACT = frozenset({"glm-dsa", "glm4moe", "deepseek2", "llama"})  # whose graphs server/fit/architectures.py builds
_CUDA_ALIGNMENT = 128
_HOST_ALIGNMENT = 32
_REPEATS_FROM = 16
# room for what an unknown graph may hold beside the parts that all models have
_UNKNOWN_SHARE = 1.25
_POOL_BYTES = 7  # a score, its mask, and a little
_POOLING_ROWS = 4  # of a pool's keys, at the peak
_KEPT_OF_A_POOL = 3  # key, gate and pooled key make a cached row


def is_exact(shape: ModelShape) -> bool:
    """False: the compute buffers of this architecture are an estimate; a dry run (server/fit/probe.py) knows."""
    return shape.architecture in _EXACT


def compute_bytes(
    shape: ModelShape, choice: ContextChoice, placement: Placement, *, draft: bool = False, dry: bool = False
) -> tuple[int, ...]:
    """Bytes for each device of the placement and, last, for the host; the context that drafts with `draft`. `dry`: what
    llama.cpp's dry run tells, which is more on several devices: it forgets which device it set for norms
    (ggml_backend_sched_reserve_size resets that first, ggml_backend_sched_reserve afterwards)."""
    pins = not dry and None not in placement.blocks  # set when all layers are on GPUs
    n_tokens = choice.n_tokens(shape.n_ctx_train)
    if not shape.n_head or not shape.head_k:
        return _without_attention(shape, placement, n_tokens, min(n_tokens, choice.n_outputs))
    sizes = (_drafting if draft else _answering)(shape, choice, placement, pins)
    if is_exact(shape):
        return tuple(sizes)
    pools = _pools(shape, choice)
    return tuple(round(size * _UNKNOWN_SHARE) + pools for size in sizes)


def _pools(shape: ModelShape, choice: ContextChoice) -> int:
    """A pooling indexer (glm5-next) makes room for the pools of every sequence, each as if it filled its whole cache:
    their keys, while they are pooled, and a score and a mask for each token of a batch."""
    if not shape.indexer_pool:
        return 0
    cells = choice.cells(shape.n_ctx_train)
    n_pools = cells.n_ctx_seq // shape.indexer_pool * choice.n_sequences
    keys = _POOLING_ROWS * 4 * shape.indexer_pool * shape.indexer_width // _KEPT_OF_A_POOL
    return n_pools * (_POOL_BYTES * choice.n_tokens(shape.n_ctx_train) + keys)


def _answering(shape: ModelShape, choice: ContextChoice, placement: Placement, pins: bool) -> list[int]:
    # with few cells the zeros of left-out blocks weigh as much as the masks, and then each block counts
    repeats = choice.cells(shape.n_ctx_train).n_ctx_seq >= _REPEATS_FROM * shape.indexer_top_k
    few = representatives(shape, placement) if repeats else all_of(shape, placement)
    experts = {index: few.host if index in placement.experts_on_host else home for index, home in few.homes.items()}
    homes = Homes(few.homes, experts, few.output, few.host)
    graph = _builder(shape, choice, homes, pins).trunk(few.blocks, few.idle)
    cuda = {few.backend_of[index] for index, device in enumerate(placement.devices) if device.is_cuda}
    sizes = _scheduled(graph, few.host, frozenset(cuda), placement, choice)
    return [sizes[backend] for backend in few.backend_of]


def _drafting(shape: ModelShape, choice: ContextChoice, placement: Placement, pins: bool) -> list[int]:
    host = len(placement.devices)
    blocks = {index: host if home is None else home for index, home in enumerate(placement.blocks)}
    experts = {index: host if index in placement.experts_on_host else home for index, home in blocks.items()}
    output = host if placement.output is None else placement.output
    graph = _builder(shape, choice, Homes(blocks, experts, output, host), pins).draft()
    cuda = frozenset(index for index, device in enumerate(placement.devices) if device.is_cuda)
    return _scheduled(graph, host, cuda, placement, choice)


def _builder(shape: ModelShape, choice: ContextChoice, homes: Homes, pins: bool) -> Builder:
    n_tokens = choice.n_tokens(shape.n_ctx_train)
    cells = choice.cells(shape.n_ctx_train)
    return Builder(shape, choice, cells, homes, n_tokens, min(n_tokens, choice.n_outputs), pins=pins)


def _scheduled(graph: Graph, host: int, cuda: frozenset[int], placement: Placement, choice: ContextChoice) -> list[int]:
    return buffer_sizes(
        graph,
        [_CUDA_ALIGNMENT] * host + [_HOST_ALIGNMENT],
        copies_to_f16=cuda,
        pipelined=placement.pipelined and choice.offload_kqv,
        op_offload=choice.op_offload,
    )


def _without_attention(shape: ModelShape, placement: Placement, n_tokens: int, n_outputs: int) -> tuple[int, ...]:
    """A recurrent model: a dozen rows of the inner width for each token, and the logits."""
    widest = max([2 * shape.n_embd, *(block.n_ff for block in shape.blocks)])
    size = round(4 * (12 * widest * n_tokens + shape.n_vocab * n_outputs) * _UNKNOWN_SHARE)
    return (size,) * (len(placement.devices) + 1)
