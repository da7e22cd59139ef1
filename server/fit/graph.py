"""Graphs of tensors as ggml has them, just sizes, sources and views: `architectures` builds, `schedule` allocates them.

A tensor is a graph input, a weight, a cache, a view of another tensor, or the result of an operation. Shapes matter
through their bytes and for the question whether a result may take an operand's place (same type, shape and strides).
"""

from __future__ import annotations

from enum import IntEnum
from math import prod

F16, F32, I32, I64 = "f16", "f32", "i32", "i64"
_ONES = ((1, 1, 1, 1), (1, 1, 1), (1, 1), (1,), ())  # a shape has four sizes
_TYPE_BYTES = {F16: 2, F32: 4, I32: 4, I64: 8}


class Op(IntEnum):
    LEAF = 0
    VIEW = 1  # reshape, permute, transpose, view: no memory of its own
    IN_PLACE = 2  # may overwrite an operand (ggml_op_can_inplace)
    ROPE = 3  # so may this, and it has no say in where it runs
    OTHER = 4
    FLASH = 5  # flash attention: has no say in where it runs, and may need room for an f16 copy of the cache
    ROWS = 6  # get_rows: never moved to a device because of its weights
    STORE = 7  # set_rows: a view of what it writes to


class Tensor:
    """`n_bytes` of its data; `layout` is equal where ggml_are_same_layout says so, None for strided views.

    The values that most tensors share are the class's: a graph has thousands, and planning makes hundreds of graphs.
    """

    is_input = False
    is_output = False
    outside = False  # weights and caches: memory that is not the graph's
    weight = False
    backend = -1
    pin = -1  # the backend that llama.cpp sets before it schedules; -1: none
    n_batch = 0  # rows that an operation with weights works on (get_op_batch_size in ggml-cuda.cu)
    extra_bytes = 0  # flash attention on CUDA: the f16 copy
    moved_extra_bytes = 0  # and one more where the cache is on another backend: then values are no view of keys
    seen = False
    copies: dict[int, list[Tensor]] | None = None  # by backend
    # the allocator's
    n_children = 0
    n_views = 0
    owned = False
    offset = 0

    def __init__(
        self, op: Op, n_bytes: int, layout: object, sources: tuple[Tensor, ...] = (), view_of: Tensor | None = None
    ) -> None:
        self.op = op
        self.n_bytes = n_bytes
        self.layout = layout
        self.sources = sources
        # views of views point to what lies below them all
        self.view_of: Tensor | None = None if view_of is None else view_of.view_of or view_of


class Graph:
    """Makes tensors and keeps the order in which ggml would compute them (ggml_build_forward_expand)."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []

    def expand(self, tensor: Tensor) -> None:
        """Add what `tensor` needs and then itself: depth first, sources from left to right."""
        if tensor.seen:
            return
        tensor.seen = True
        for source in tensor.sources:
            if not source.seen:
                self.expand(source)
        (self.leafs if tensor.op is Op.LEAF else self.nodes).append(tensor)


def _shape(type_: str, sizes: tuple[int, ...]) -> tuple[int, object]:
    return prod(sizes) * _TYPE_BYTES[type_], (type_, *sizes, *_ONES[len(sizes)])


def leaf(type_: str, *sizes: int) -> Tensor:
    """A tensor that nobody computes, such as room for zeros."""
    return Tensor(Op.LEAF, *_shape(type_, sizes))


def graph_input(type_: str, *sizes: int) -> Tensor:
    tensor = leaf(type_, *sizes)
    tensor.is_input = True
    return tensor


def weight(n_bytes: int, backend: int) -> Tensor:
    """A model's tensor in the memory of `backend`."""
    tensor = Tensor(Op.LEAF, n_bytes, None)
    tensor.outside = tensor.weight = True
    tensor.backend = backend
    return tensor


def cache(n_bytes: int, backend: int) -> Tensor:
    """One block's cache of keys, values or indexer keys, in the memory of `backend`."""
    tensor = Tensor(Op.LEAF, n_bytes, None)
    tensor.outside = True
    tensor.backend = backend
    return tensor


def view(tensor: Tensor, *, type_: str = F32, sizes: tuple[int, ...] | None = None) -> Tensor:
    """A view of `tensor`, of all of it or a contiguous one of the shape `sizes`."""
    n_bytes, layout = (tensor.n_bytes, None) if sizes is None else _shape(type_, sizes)
    return Tensor(Op.VIEW, n_bytes, layout, (tensor,), tensor)


def operation(op: Op, sources: tuple[Tensor, ...], type_: str, *sizes: int, n_batch: int = 0) -> Tensor:
    tensor = Tensor(op, *_shape(type_, sizes), sources)
    tensor.n_batch = n_batch
    return tensor


def store(target: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
    """ggml_set_rows: a view of `target`, which it reads too."""
    return Tensor(Op.STORE, 0, target.layout, (rows, indices, target), target)
