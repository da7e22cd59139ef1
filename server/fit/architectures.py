"""The graphs of the architectures whose compute buffers we know: what llama.cpp builds for one batch, in its order.

Three kinds of attention (grouped, latent, latent behind an indexer) with dense or mixed feed-forwards cover the GLM
models: glm4moe, deepseek2 (GLM-4.7-Flash) and glm-dsa, in src/models/*.cpp; the parts are src/llama-graph.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.fit.cells import row_bytes
from server.fit.choice import Cells, ContextChoice
from server.fit.facts import Block, ModelShape
from server.fit.graph import (
    F16,
    F32,
    I32,
    I64,
    Graph,
    Op,
    Tensor,
    cache,
    graph_input,
    leaf,
    operation,
    store,
    view,
    weight,
)

_QUANTIZED = frozenset({"q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"})


@dataclass(frozen=True, slots=True)
class Homes:
    """Backends by number, the host last."""

    blocks: Mapping[int, int]  # by the block's index
    experts: Mapping[int, int]
    output: int
    host: int


@dataclass(frozen=True, slots=True)
class _Inputs:
    positions: Tensor
    k_rows: Tensor
    v_rows: Tensor | None
    mask: Tensor
    k_rotation: Tensor | None
    v_rotation: Tensor | None
    indexer_rows: Tensor | None
    indexer_mask: Tensor | None
    indexer_rotation: Tensor | None


class Builder:
    """Builds the graph of one batch of `n_tokens`, of which `n_outputs` get logits. `pins`: norms run on the device of
    their block."""

    def __init__(
        self,
        shape: ModelShape,
        choice: ContextChoice,
        cells: Cells,
        homes: Homes,
        n_tokens: int,
        n_outputs: int,
        *,
        pins: bool = False,
    ) -> None:
        self.graph = Graph()
        self._shape = shape
        self._choice = choice
        self._cells = cells
        self._homes = homes
        self._n = n_tokens
        self._n_outputs = n_outputs
        self._pins = pins
        self._top_k: Tensor | None = None

    def trunk(self, blocks: Sequence[Block], idle: Mapping[int, int]) -> Graph:
        """The model's own graph over `blocks`; `idle` tells how many blocks after one are left out."""
        shape, n = self._shape, self._n
        rows = self._embedding()
        inputs = self._inputs()
        out_ids = graph_input(I32, self._n_outputs)
        last = blocks[-1].index
        for block in blocks:
            residual = rows
            normed = self._norm(rows, self._weight(block, "attn_norm.weight"), shape.n_embd, n)
            mixed = self._attention(block, normed, inputs)
            if block.index == last:
                mixed = operation(Op.ROWS, (mixed, out_ids), F32, shape.n_embd, self._n_outputs)
                residual = operation(Op.ROWS, (residual, out_ids), F32, shape.n_embd, self._n_outputs)
                n = self._n_outputs
            rows = self._feed_forward(block, operation(Op.IN_PLACE, (mixed, residual), F32, shape.n_embd, n), n)
            if shape.indexer_width:
                self._add_zeros(idle.get(block.index, 0), self._homes.blocks[block.index])
        rows = self._norm(rows, weight(4 * shape.n_embd, self._homes.output), shape.n_embd, n, inside=False)
        rows.is_output = True
        logits = self._matmul(weight(shape.output_bytes, self._homes.output), rows, shape.n_vocab, n)
        logits.is_output = True
        self.graph.expand(logits)
        return self.graph

    def draft(self) -> Graph:
        """The NextN block's graph, in the context that drafts (graph_mtp)."""
        shape, n = self._shape, self._n
        block = shape.nextn[0]
        # room for embeddings that a client sends is made too, but nothing uses it here, so it takes no memory
        tokens = graph_input(I32, n)
        embedded = operation(Op.ROWS, (weight(0, self._homes.host), tokens), F32, shape.n_embd, n)
        hidden = graph_input(F32, shape.n_embd, n)
        inputs = self._inputs(indexer=False)
        out_ids = graph_input(I32, self._n_outputs)
        hidden = self._norm(hidden, self._weight(block, "nextn.hnorm.weight"), shape.n_embd, n)
        embedded = self._norm(embedded, self._weight(block, "nextn.enorm.weight"), shape.n_embd, n)
        both = operation(Op.OTHER, (embedded, hidden), F32, 2 * shape.n_embd, n)
        rows = self._matmul(self._weight(block, "nextn.eh_proj.weight"), both, shape.n_embd, n)
        normed = self._norm(rows, self._weight(block, "attn_norm.weight"), shape.n_embd, n)
        mixed = self._attention(block, normed, inputs, indexer=False)
        rows = self._feed_forward(block, operation(Op.IN_PLACE, (mixed, rows), F32, shape.n_embd, n), n)
        head_norm = block.tensors.get("nextn.shared_head_norm.weight")
        rows = self._norm(
            rows,
            weight(4 * shape.n_embd, self._homes.output if head_norm is None else self._homes.blocks[block.index]),
            shape.n_embd,
            n,
            inside=False,
        )
        rows.is_output = True
        rows = operation(Op.ROWS, (rows, out_ids), F32, shape.n_embd, self._n_outputs)
        head = weight(shape.output_bytes, self._homes.output)
        logits = self._matmul(head, rows, shape.n_vocab, self._n_outputs)
        logits.is_output = True
        self.graph.expand(logits)
        return self.graph

    # ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _embedding(self) -> Tensor:
        n_embd, n = self._shape.n_embd, self._n
        rows = operation(Op.ROWS, (weight(0, self._homes.host), graph_input(I32, n)), F32, n_embd, n)
        self.graph.expand(rows)
        self.graph.expand(graph_input(F32, n_embd, n))  # for clients that send vectors, always there
        return rows

    def _inputs(self, *, indexer: bool = True) -> _Inputs:
        n, shape, choice = self._n, self._shape, self._choice
        has_indexer = indexer and shape.indexer_width > 0
        v_rows = None if shape.is_latent else graph_input(I64, n if choice.flash_attn else n * self._v_width)
        rotates_k = not shape.is_latent and choice.cache_type_k in _QUANTIZED and shape.head_k % 64 == 0
        rotates_v = not shape.is_latent and choice.cache_type_v in _QUANTIZED and shape.head_v % 64 == 0
        side = _rotation_side(shape.head_k)
        indexer_side = _rotation_side(shape.indexer_width)
        return _Inputs(
            positions=graph_input(I32, n),
            k_rows=graph_input(I64, n),
            v_rows=v_rows,
            mask=graph_input(self._mask_type, *self._per_cell),
            k_rotation=graph_input(F32, side, side) if rotates_k else None,
            v_rotation=graph_input(F32, 64, 64) if rotates_v else None,
            indexer_rows=graph_input(I64, n) if has_indexer else None,
            indexer_mask=graph_input(F16, *self._per_cell) if has_indexer else None,
            indexer_rotation=graph_input(F32, indexer_side, indexer_side) if has_indexer else None,
        )

    @property
    def _v_width(self) -> int:
        return max(block.kept.v_values for block in self._shape.blocks)

    @property
    def _mask_type(self) -> str:
        return F16 if self._choice.flash_attn else F32

    @property
    def _per_cell(self) -> tuple[int, int, int, int]:
        """The shape of a mask: cells of a stream, tokens of a stream, 1, streams."""
        streams = self._cells.n_streams
        return self._cells.n_ctx_seq, self._n // streams, 1, streams

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _weight(self, block: Block, name: str) -> Tensor:
        return weight(block.tensors.get(name, 0), self._homes.blocks[block.index])

    def _cache(self, block: Block, type_: str, n_values: int) -> Tensor:
        home = self._homes.blocks[block.index] if self._choice.offload_kqv else self._homes.host
        return cache(row_bytes(type_, n_values) * self._cells.n_ctx, home)

    def _norm(self, rows: Tensor, factors: Tensor, *sizes: int, inside: bool = True) -> Tensor:
        """`inside` of a block, whose device llama.cpp sets for its norms (llama_context::graph_get_cb): left alone they
        would run where the last block did, and their results cross over beside the rows themselves."""
        pin = factors.backend if inside and self._pins else -1
        normed = operation(Op.IN_PLACE, (rows,), F32, *sizes)
        normed.pin = pin
        return operation(Op.IN_PLACE, (normed, factors), F32, *sizes, n_batch=sizes[-1])

    def _matmul(self, matrix: Tensor, rows: Tensor, *sizes: int) -> Tensor:
        return operation(Op.OTHER, (matrix, rows), F32, *sizes, n_batch=sizes[1])

    def _feed_forward(self, block: Block, rows: Tensor, n: int) -> Tensor:
        n_embd = self._shape.n_embd
        name = "ffn_norm.weight" if "ffn_norm.weight" in block.tensors else "post_attention_norm.weight"
        normed = self._norm(rows, self._weight(block, name), n_embd, n)
        if not block.weights.experts:
            mixed = self._dense(block, "", normed, n)
        else:
            mixed = self._experts(block, normed, n)
            if block.n_ff:
                shared = self._dense(block, "_shexp", normed, n)
                mixed = operation(Op.IN_PLACE, (mixed, shared), F32, n_embd, n)
        return operation(Op.IN_PLACE, (mixed, rows), F32, n_embd, n)

    def _dense(self, block: Block, ending: str, rows: Tensor, n: int) -> Tensor:
        up = self._matmul(self._weight(block, f"ffn_up{ending}.weight"), rows, block.n_ff, n)
        gate = self._matmul(self._weight(block, f"ffn_gate{ending}.weight"), rows, block.n_ff, n)
        active = operation(Op.OTHER, (gate, up), F32, block.n_ff, n)
        return self._matmul(self._weight(block, f"ffn_down{ending}.weight"), active, self._shape.n_embd, n)

    def _experts(self, block: Block, rows: Tensor, n: int) -> Tensor:
        """build_moe_ffn with sigmoid gates, a selection bias, and normed and scaled weights."""
        shape, graph = self._shape, self.graph
        expert_home = self._homes.experts[block.index]
        used, n_embd, n_ff = shape.n_expert_used, shape.n_embd, shape.n_ff_expert
        scores = self._matmul(self._weight(block, "ffn_gate_inp.weight"), rows, shape.n_expert, n)
        probabilities = operation(Op.IN_PLACE, (scores,), F32, shape.n_expert, n)
        biased = probabilities
        if "exp_probs_b.bias" in block.tensors:
            bias = self._weight(block, "exp_probs_b.bias")
            biased = operation(Op.IN_PLACE, (probabilities, bias), F32, shape.n_expert, n, n_batch=n)
        chosen = view(operation(Op.OTHER, (biased,), I32, shape.n_expert, n))
        chances = view(probabilities, sizes=(1, shape.n_expert, n))
        shares = view(operation(Op.ROWS, (chances, chosen), F32, 1, used, n), sizes=(used, n))
        total = operation(Op.IN_PLACE, (operation(Op.OTHER, (shares,), F32, 1, n),), F32, 1, n)
        shares = view(operation(Op.IN_PLACE, (shares, total), F32, used, n), sizes=(1, used, n))
        shares = operation(Op.IN_PLACE, (shares,), F32, 1, used, n)
        graph.expand(shares)
        each = view(rows, sizes=(n_embd, 1, n))

        def matrix(name: str) -> Tensor:
            return weight(block.tensors.get(f"{name}.weight", 0), expert_home)

        up = operation(Op.OTHER, (matrix("ffn_up_exps"), each, chosen), F32, n_ff, used, n, n_batch=n)
        gate = operation(Op.OTHER, (matrix("ffn_gate_exps"), each, chosen), F32, n_ff, used, n, n_batch=n)
        active = operation(Op.OTHER, (gate, up), F32, n_ff, used, n)
        down = operation(Op.OTHER, (matrix("ffn_down_exps"), active, chosen), F32, n_embd, used, n, n_batch=n)
        weighted = operation(Op.IN_PLACE, (down, shares), F32, n_embd, used, n)
        graph.expand(weighted)
        parts = [view(weighted) for _ in range(used)]
        for part in parts:
            graph.expand(part)
        total = parts[0]
        for part in parts[1:]:
            total = operation(Op.IN_PLACE, (total, part), F32, n_embd, n)
            graph.expand(total)
        return operation(Op.OTHER, (total,), F32, n_embd, n) if used == 1 else total

    # ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _attention(self, block: Block, rows: Tensor, inputs: _Inputs, *, indexer: bool = True) -> Tensor:
        if self._shape.is_latent:
            return self._latent(block, rows, inputs, indexer=indexer and self._shape.indexer_width > 0)
        return self._grouped(block, rows, inputs)

    def _grouped(self, block: Block, rows: Tensor, inputs: _Inputs) -> Tensor:
        shape, n, graph = self._shape, self._n, self.graph
        q = self._heads(block, "attn_q", rows, shape.n_head, shape.head_k)
        k = self._heads(block, "attn_k", rows, shape.n_head_kv, shape.head_k)
        v = self._heads(block, "attn_v", rows, shape.n_head_kv, shape.head_v)
        if "attn_q_norm.weight" in block.tensors:
            q = self._norm(q, self._weight(block, "attn_q_norm.weight"), shape.head_k, shape.n_head, n)
        if "attn_k_norm.weight" in block.tensors:
            k = self._norm(k, self._weight(block, "attn_k_norm.weight"), shape.head_k, shape.n_head_kv, n)
        q = operation(Op.ROPE, (q, inputs.positions), F32, shape.head_k, shape.n_head, n)
        k = operation(Op.ROPE, (k, inputs.positions), F32, shape.head_k, shape.n_head_kv, n)
        if inputs.k_rotation is not None:
            q = _rotated(q, inputs.k_rotation, shape.n_head * shape.head_k * n)
            k = _rotated(k, inputs.k_rotation, shape.n_head_kv * shape.head_k * n)
        if inputs.v_rotation is not None:
            v = _rotated(v, inputs.v_rotation, shape.n_head_kv * shape.head_v * n)
        for rows_of in (q, v, k):
            graph.expand(rows_of)
        kept, choice = block.kept, self._choice
        k_cache = self._cache(block, choice.cache_type_k, kept.k_values)
        v_cache = self._cache(block, choice.cache_type_v, kept.v_values)
        assert inputs.v_rows is not None
        graph.expand(store(k_cache, view(k), inputs.k_rows))
        graph.expand(store(v_cache, view(v), inputs.v_rows))
        out = self._attend(block, q, k_cache, v_cache, inputs.mask, shape.head_v)
        out = view(out, sizes=(shape.n_head * shape.head_v, n))
        graph.expand(out)
        if inputs.v_rotation is not None:
            out = _rotated(out, inputs.v_rotation, shape.n_head * shape.head_v * n)
        return self._matmul(self._weight(block, "attn_output.weight"), out, shape.n_embd, n)

    def _heads(self, block: Block, name: str, rows: Tensor, n_heads: int, width: int) -> Tensor:
        out = self._matmul(self._weight(block, f"{name}.weight"), rows, n_heads * width, self._n)
        if f"{name}.bias" in block.tensors:
            bias = self._weight(block, f"{name}.bias")
            out = operation(Op.IN_PLACE, (out, bias), F32, n_heads * width, self._n, n_batch=self._n)
        return view(out, sizes=(width, n_heads, self._n))

    def _latent(self, block: Block, rows: Tensor, inputs: _Inputs, *, indexer: bool) -> Tensor:
        shape, n, graph = self._shape, self._n, self.graph
        rope, lora, heads = shape.n_rope, shape.kv_lora_rank, shape.n_head
        compressed = self._matmul(self._weight(block, "attn_q_a.weight"), rows, shape.q_lora_rank, n)
        compressed = self._norm(compressed, self._weight(block, "attn_q_a_norm.weight"), shape.q_lora_rank, n)
        if indexer and block.kept.indexer_values:
            self._index(block, rows, compressed, inputs)
        q = self._matmul(self._weight(block, "attn_q_b.weight"), compressed, heads * shape.head_k_mla, n)
        kv = self._matmul(self._weight(block, "attn_kv_a_mqa.weight"), rows, lora + rope, n)
        q_rope = operation(Op.ROPE, (view(q), inputs.positions), F32, rope, heads, n)
        k_rope = operation(Op.ROPE, (view(kv), inputs.positions), F32, rope, 1, n)
        latent = self._norm(view(kv), self._weight(block, "attn_kv_a_norm.weight"), lora, n)
        absorbed = self._matmul(self._weight(block, "attn_k_b.weight"), view(q), lora, n, heads)
        q = operation(Op.OTHER, (view(absorbed), q_rope), F32, lora + rope, heads, n)
        v = view(latent, sizes=(lora, 1, n))
        k = operation(Op.OTHER, (v, k_rope), F32, lora + rope, 1, n)
        for rows_of in (q, v, k):
            graph.expand(rows_of)
        k_cache = self._cache(block, self._choice.cache_type_k, block.kept.k_values)
        graph.expand(store(k_cache, view(k), inputs.k_rows))
        mask = inputs.mask if not indexer or self._top_k is None else self._chosen_mask(inputs.mask, self._top_k)
        out = self._attend(block, q, k_cache, None, mask, lora)
        out = view(out, sizes=(heads * shape.head_v_mla, n))
        graph.expand(out)
        return self._matmul(self._weight(block, "attn_output.weight"), out, shape.n_embd, n)

    def _index(self, block: Block, rows: Tensor, compressed: Tensor, inputs: _Inputs) -> None:
        """The lightning indexer of a full block: scores of all cells, and the best of them."""
        shape, n, graph = self._shape, self._n, self.graph
        width, heads = block.kept.indexer_values, shape.indexer_heads
        rotation, mask, at = inputs.indexer_rotation, inputs.indexer_mask, inputs.indexer_rows
        assert rotation is not None
        assert mask is not None
        assert at is not None
        q = self._matmul(self._weight(block, "indexer.attn_q_b.weight"), compressed, heads * width, n)
        q = operation(Op.ROPE, (view(q), inputs.positions), F32, width, heads, n)
        k = self._matmul(self._weight(block, "indexer.attn_k.weight"), rows, width, n)
        k = operation(Op.OTHER, (k,), F32, width, n)
        for name in ("indexer.k_norm.weight", "indexer.k_norm.bias"):
            k = operation(Op.IN_PLACE, (k, self._weight(block, name)), F32, width, n, n_batch=n)
        k = operation(Op.ROPE, (view(k), inputs.positions), F32, width, 1, n)
        q = operation(Op.OTHER, (rotation, q), F32, width, heads, n)
        k = operation(Op.OTHER, (rotation, k), F32, width, 1, n)
        k_cache = self._cache(block, self._choice.cache_type_k, width)
        graph.expand(store(k_cache, view(k), at))
        weights = self._matmul(self._weight(block, "indexer.proj.weight"), rows, heads, n)
        weights = operation(Op.IN_PLACE, (view(weights),), F32, heads, n)
        scores = operation(Op.OTHER, (view(q), view(k_cache), weights, mask), F32, *self._per_cell)
        best = operation(Op.OTHER, (scores,), I32, self._n_chosen, *self._per_cell[1:])
        self._top_k = operation(Op.OTHER, (best,), I32, self._n_chosen, *self._per_cell[1:])

    @property
    def _n_chosen(self) -> int:
        return min(self._cells.n_ctx_seq, self._shape.indexer_top_k)

    def _add_zeros(self, count: int, backend: int) -> None:
        """What left-out blocks hold from the start of the pass (`_chosen_mask`)."""
        for _ in range(count):
            zeros = leaf(F32, 1, self._n_chosen, *self._per_cell[1::2])
            zeros.backend = backend
            self.graph.expand(zeros)

    def _chosen_mask(self, mask: Tensor, top_k: Tensor) -> Tensor:
        """The mask with all cells closed but those that the indexer chose."""
        closed = operation(Op.IN_PLACE, (mask,), self._mask_type, *self._per_cell)
        zeros = leaf(F32, 1, self._n_chosen, *self._per_cell[1::2])
        zeros = operation(Op.IN_PLACE, (zeros,), F32, 1, self._n_chosen, *self._per_cell[1::2])
        opened = view(store(view(closed), zeros, view(top_k)))
        return operation(Op.IN_PLACE, (opened, mask), self._mask_type, *self._per_cell)

    def _attend(self, block: Block, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, width: int) -> Tensor:
        """build_attn_mha. `v` None: latent attention, where the values are a view of the keys."""
        keys = view(k)
        values = view(keys if v is None else v)
        if not self._choice.flash_attn:
            return self._attend_plainly(block, q, keys, values, mask, width)
        heads, n, (_, n_each, _, streams) = self._shape.n_head, self._n, self._per_cell
        out = operation(Op.FLASH, (view(q), keys, values, mask), F32, width, heads, n_each, streams)
        out.extra_bytes = self._copy_bytes(block)
        if v is not None:
            return out
        if self._choice.cache_type_k != F16:
            out.moved_extra_bytes = 2 * width * self._cells.n_ctx
        out = self._decompressed(block, out)
        return operation(Op.OTHER, (view(out),), F32, self._shape.head_v_mla, heads, n)

    def _attend_plainly(
        self, block: Block, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, width: int
    ) -> Tensor:
        """Without flash attention: a score for each cell, token and head."""
        heads, (cells, n_each, _, streams) = self._shape.n_head, self._per_cell
        scores = operation(Op.OTHER, (keys, view(q)), F32, cells, n_each, heads, streams)
        shares = operation(Op.IN_PLACE, (scores, mask), F32, cells, n_each, heads, streams)
        if self._shape.is_latent:  # a plain cache keeps its values transposed, a latent one cannot
            type_ = F32 if self._choice.cache_type_k == F32 else F16
            values = operation(Op.OTHER, (view(values),), type_, cells, width, 1, streams)
            out = operation(Op.OTHER, (values, shares), F32, width, n_each, heads, streams)
            out, width = self._decompressed(block, out), self._shape.head_v_mla
        else:
            out = operation(Op.OTHER, (values, shares), F32, width, n_each, heads, streams)
        return operation(Op.OTHER, (view(out),), F32, width * heads, self._n)

    def _decompressed(self, block: Block, out: Tensor) -> Tensor:
        sizes = (self._shape.head_v_mla, self._per_cell[1], self._shape.n_head, self._per_cell[3])
        return self._matmul(self._weight(block, "attn_v_b.weight"), view(out), *sizes)

    def _copy_bytes(self, block: Block) -> int:
        """CUDA's flash attention reads f16: of any other cache it makes a copy, one block at a time
        (ggml_cuda_flash_attn_ext_get_alloc_size)."""
        choice, kept = self._choice, block.kept
        k_values = kept.k_values if choice.cache_type_k != F16 else 0
        v_values = kept.v_values if choice.cache_type_v != F16 else 0
        return 2 * (k_values + v_values) * self._cells.n_ctx


def _rotated(rows: Tensor, rotation: Tensor, n_values: int) -> Tensor:
    side = int(rotation.layout[1])  # type: ignore[index]
    out = operation(Op.OTHER, (rotation, view(rows)), F32, side, n_values // side)
    return view(out)


def _rotation_side(width: int) -> int:
    """The largest power of two from 64 on that divides `width`."""
    side = 64
    while width and width % (2 * side) == 0:
        side *= 2
    return side
