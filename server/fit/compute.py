"""Bytes of the compute buffers: the model's graph for one batch, scheduled over a placement."""

from __future__ import annotations

from server.fit.architectures import Builder, Homes
from server.fit.choice import ContextChoice, Placement
from server.fit.facts import ModelShape
from server.fit.schedule import buffer_sizes

_EXACT = frozenset({"glm-dsa", "glm4moe", "deepseek2", "llama"})  # whose graphs server/fit/architectures.py builds
_CUDA_ALIGNMENT = 128
_HOST_ALIGNMENT = 32
# room for what an unknown graph may hold beside the parts that all models have
_UNKNOWN_SHARE = 1.25


def is_exact(shape: ModelShape) -> bool:
    """False: the compute buffers of this architecture are an estimate; a dry run (server/fit/probe.py) knows."""
    return shape.architecture in _EXACT


def compute_bytes(
    shape: ModelShape, choice: ContextChoice, placement: Placement, *, draft: bool = False
) -> tuple[int, ...]:
    """Bytes for each device of the placement and, last, for the host; the context that drafts with `draft`."""
    cells = choice.cells(shape.n_ctx_train)
    n_tokens = choice.n_tokens(shape.n_ctx_train)
    builder = Builder(shape, choice, cells, _homes(placement), n_tokens, min(n_tokens, choice.n_outputs))
    if is_exact(shape):
        graph = builder.draft() if draft else builder.trunk()
    elif shape.n_head and shape.head_k:
        graph = builder.trunk()
    else:
        return _without_attention(shape, placement, n_tokens, min(n_tokens, choice.n_outputs))
    alignments = [_CUDA_ALIGNMENT] * len(placement.devices) + [_HOST_ALIGNMENT]
    sizes = buffer_sizes(graph, alignments, pipelined=placement.pipelined)
    return tuple(sizes if is_exact(shape) else (round(size * _UNKNOWN_SHARE) for size in sizes))


def _homes(placement: Placement) -> Homes:
    host = len(placement.devices)
    blocks = [host if home is None else home for home in placement.blocks]
    experts = [host if index in placement.experts_on_host else home for index, home in enumerate(blocks)]
    output = host if placement.output is None else placement.output
    copying = frozenset(index for index, device in enumerate(placement.devices) if device.is_cuda)
    return Homes(blocks, experts, output, host, copying)


def _without_attention(shape: ModelShape, placement: Placement, n_tokens: int, n_outputs: int) -> tuple[int, ...]:
    """A recurrent model: a dozen rows of the inner width for each token, and the logits."""
    widest = max([2 * shape.n_embd, *(block.n_ff for block in shape.blocks)])
    size = round(4 * (12 * widest * n_tokens + shape.n_vocab * n_outputs) * _UNKNOWN_SHARE)
    return (size,) * (len(placement.devices) + 1)
