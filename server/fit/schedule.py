"""How much memory a graph takes on each device: ggml's scheduler and graph allocator, replayed on sizes alone.

Two pieces of llama.cpp are repeated here step by step, because no formula says what they do:
ggml_backend_sched_split_graph (ggml/src/ggml-backend.cpp) decides where each operation runs and which tensors are
copied there, and ggml_gallocr (ggml/src/ggml-alloc.c) places all results of a device in one buffer, the best fitting
free block first.
"""

from __future__ import annotations

from server.fit.graph import Graph, Op, Tensor

_OFFLOAD_FROM = 32  # rows; ggml-cuda's min_batch_size
_N_COPIES = 4  # GGML_SCHED_MAX_COPIES
_SILENT = (Op.ROPE, Op.FLASH)  # their weights are too small to decide where they run


def buffer_sizes(
    graph: Graph,
    alignments: list[int],
    *,
    copies_to_f16: frozenset[int] = frozenset(),
    pipelined: bool = False,
    op_offload: bool = True,
) -> list[int]:
    """Bytes of the compute buffer of each backend; the host is the last of them. Uses the graph up. `copies_to_f16`:
    the backends whose flash attention needs `extra_bytes`."""
    host = len(alignments) - 1
    _assign(graph, host, op_offload)
    for node in graph.nodes:
        if node.backend not in copies_to_f16:
            node.extra_bytes = node.moved_extra_bytes = 0
    nodes, leafs = _with_copies(graph, host, _N_COPIES if pipelined else 1)
    pools = [_Pool(alignment) for alignment in alignments]
    _allocate(nodes, leafs, pools)
    return [pool.size for pool in pools]


# ── where operations run ─────────────────────────────────────────────────────────────────────────────────────────────


def _assign(graph: Graph, host: int, op_offload: bool) -> None:
    """Passes 1 to 4 of ggml_backend_sched_split_graph."""
    for tensor in graph.leafs:
        if tensor.is_input:
            tensor.backend = host
    for node in graph.nodes:
        node.backend = node.pin if node.pin >= 0 else _from_memory(node, host, op_offload)
    working = [node for node in graph.nodes if node.op is not Op.VIEW]
    if host:
        _spread(working, host)
        _spread(reversed(working), host)
    _spread(working, -1)
    _spread(reversed(working), -1)
    for node in graph.nodes:
        if node.backend < 0 and node.view_of is not None:
            node.backend = node.view_of.backend
        for source in node.sources:
            if source.backend < 0:
                source.backend = node.backend if source.view_of is None else source.view_of.backend


def _from_memory(node: Tensor, host: int, op_offload: bool) -> int:
    """Where a node has to run because of memory that is there already; -1: no matter."""
    if node.view_of is not None and node.view_of.outside:
        return node.view_of.backend
    if node.op in _SILENT:
        return -1
    for source in node.sources:
        if source.weight:
            offloads = op_offload and source.backend == host and node.op is not Op.ROWS
            return 0 if offloads and node.n_batch >= _OFFLOAD_FROM else source.backend
    return -1


def _spread(nodes: object, skipped: int) -> None:
    current = -1
    for node in nodes:  # type: ignore[attr-defined]
        if node.backend >= 0:
            current = -1 if node.backend == skipped else node.backend
        elif current >= 0:
            node.backend = current


def _with_copies(graph: Graph, host: int, n_copies: int) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """Passes 5 and 6: (tensor, backend) of all nodes with the copies at the start of each split; and of the leafs."""
    nodes: list[tuple[Tensor, int]] = []
    copies: list[tuple[Tensor, int]] = []
    split: list[Tensor] = []  # nodes of the split that is being collected
    inputs: list[Tensor] = []
    current = next((node.backend for node in graph.nodes if node.op is not Op.VIEW), host)

    def close() -> None:
        for source in inputs:
            here = (source.copies or {})[current]
            nodes.append((Tensor(Op.LEAF, 0, None, (source,), source), source.backend))
            nodes.append((here[0], current))
            if n_copies > 1:
                copies.extend((copy, current) for copy in here)
        nodes.extend((node, node.backend) for node in split)
        split.clear()
        inputs.clear()

    for node in graph.nodes:
        if node.op is not Op.VIEW:
            moves_weight = bool(inputs) and any(source.weight and source.backend != current for source in node.sources)
            if node.backend != current or moves_weight:
                close()
                current = node.backend
            if node.moved_extra_bytes and node.sources[1].backend != current:
                node.extra_bytes += node.moved_extra_bytes
            if any(source.backend != current for source in node.sources):
                node.sources = tuple(_at(source, current, inputs, n_copies) for source in node.sources)
        split.append(node)
    close()
    leafs: list[tuple[Tensor, int]] = []
    if n_copies > 1:
        leafs = [pair for leaf in graph.leafs if leaf.is_input for pair in _input_copies(leaf, n_copies)] + copies
    return nodes, leafs + [(leaf, leaf.backend) for leaf in graph.leafs]


def _at(source: Tensor, backend: int, inputs: list[Tensor], n_copies: int) -> Tensor:
    """`source` itself, or its copy on `backend`."""
    if source.backend == backend:
        return source
    if source.copies is None:
        source.copies = {}
    if backend not in source.copies:
        source.copies[backend] = [_copy(source, n_copies > 1) for _ in range(n_copies)]
        inputs.append(source)
    return source.copies[backend][0]


def _copy(source: Tensor, kept: bool) -> Tensor:
    copy = Tensor(Op.LEAF, source.n_bytes, source.layout)
    copy.is_input = copy.is_output = kept
    return copy


def _input_copies(leaf: Tensor, n_copies: int) -> list[tuple[Tensor, int]]:
    leaf.is_output = True
    return [(leaf, leaf.backend)] + [(_copy(leaf, True), leaf.backend) for _ in range(n_copies - 1)]


# ── where results lie ────────────────────────────────────────────────────────────────────────────────────────────────


class _Pool:
    """ggml_dyn_tallocr with one chunk: free blocks by address; the last one has no end."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.size = 0
        self._starts = [0]
        self._ends = [1 << 62]

    def take(self, n_bytes: int) -> int:
        n_bytes = self._aligned(n_bytes)
        best, best_size = len(self._starts) - 1, 1 << 63
        for index in range(best):
            size = self._ends[index] - self._starts[index]
            if n_bytes <= size <= best_size:
                best, best_size = index, size
        offset = self._starts[best]
        self._starts[best] += n_bytes
        if self._starts[best] == self._ends[best]:
            del self._starts[best], self._ends[best]
        self.size = max(self.size, offset + n_bytes)
        return offset

    def give(self, offset: int, n_bytes: int) -> None:
        end = offset + self._aligned(n_bytes)
        starts, ends = self._starts, self._ends
        index = 0
        while starts[index] < offset:
            index += 1
        joins_next = starts[index] == end
        if index and ends[index - 1] == offset:
            if joins_next:
                ends[index - 1] = ends[index]
                del starts[index], ends[index]
            else:
                ends[index - 1] = end
        elif joins_next:
            starts[index] = offset
        else:
            starts.insert(index, offset)
            ends.insert(index, end)

    def give_rest(self, offset: int, n_held: int, n_kept: int) -> None:
        """Shrink what lies at `offset`."""
        held, kept = self._aligned(n_held), self._aligned(n_kept)
        if held > kept:
            self.give(offset + kept, held - kept)

    def _aligned(self, n_bytes: int) -> int:
        return -(-n_bytes // self.alignment) * self.alignment


def _allocate(nodes: list[tuple[Tensor, int]], leafs: list[tuple[Tensor, int]], pools: list[_Pool]) -> None:
    """ggml_gallocr_alloc_graph_impl."""
    for tensor, backend in leafs:
        _place(tensor, backend, pools)
    _count(nodes, pools)
    for node, backend in nodes:
        for source in node.sources:
            if not source.owned and source.op is Op.LEAF:
                _place(source, backend, pools)
        if node.view_of is None:
            _place(node, backend, pools)
        for source in node.sources:
            source.n_children -= 1
            if source.n_children == 0 and source.n_views == 0:
                _drop(source, pools)


def _count(nodes: list[tuple[Tensor, int]], pools: list[_Pool]) -> None:
    """Users and views of each tensor; inputs are placed before anything is computed."""
    for node, backend in nodes:
        if node.view_of is not None and node.op is not Op.LEAF:
            node.view_of.n_views += 1
        if node.is_input:
            _place(node, backend, pools)
        for source in node.sources:
            source.n_children += 1
            if source.is_input:
                _place(source, backend, pools)


def _place(tensor: Tensor, backend: int, pools: list[_Pool]) -> None:
    if tensor.outside or tensor.owned or tensor.view_of is not None:
        return
    tensor.owned = True
    tensor.backend = backend
    if tensor.op in (Op.IN_PLACE, Op.ROPE) and _take_over(tensor, pools):
        return
    tensor.offset = pools[backend].take(tensor.n_bytes + tensor.extra_bytes)


def _take_over(tensor: Tensor, pools: list[_Pool]) -> bool:
    """Use the memory of an operand that nobody needs afterwards. Views never qualify: they own none."""
    for parent in tensor.sources:
        if not parent.owned or parent.is_output or parent.layout != tensor.layout:
            continue
        if parent.n_children == 1 and parent.n_views == 0:
            tensor.offset = parent.offset
            tensor.backend = parent.backend
            parent.owned = False
            pools[parent.backend].give_rest(parent.offset, parent.n_bytes + parent.extra_bytes, tensor.n_bytes)
            return True
    return False


def _drop(tensor: Tensor, pools: list[_Pool]) -> None:
    """Free a tensor without users, or what it was the last view of."""
    if tensor.view_of is not None:
        tensor = tensor.view_of
        tensor.n_views -= 1
        if tensor.n_views or tensor.n_children:
            return
    if tensor.owned and not tensor.is_output:
        pools[tensor.backend].give(tensor.offset, tensor.n_bytes + tensor.extra_bytes)
        tensor.owned = False
