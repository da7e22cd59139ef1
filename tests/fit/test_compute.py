"""Properties of the replayed scheduler and allocator."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.fit import compute
from server.fit.choice import ContextChoice, Device, Placement, place_by_counts, place_on_host
from server.fit.compute import compute_bytes
from server.fit.facts import ModelShape
from server.fit.graph import F32, Graph, Op, graph_input, operation
from server.fit.representatives import all_of
from server.fit.schedule import buffer_sizes
from tests.fit.conftest import Shapes

MODELS = ("glm-5.2", "glm-4.6", "glm-4.5-air", "glm-4.7-flash")


def placement_of(shape: ModelShape, cuts: list[int], pipelined: bool) -> Placement:
    n_places = shape.n_blocks + 1
    edges = [0, *sorted({cut % n_places for cut in cuts} - {0}), n_places]
    counts = [end - start for start, end in itertools.pairwise(edges)]
    devices = [Device(f"CUDA{index}", 1 << 40, 1 << 40) for index in range(len(counts))]
    return place_by_counts(devices, counts, shape.n_blocks, pipelined=pipelined and len(counts) > 1)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    cuts=st.lists(st.integers(0, 500), max_size=7),
    pipelined=st.booleans(),
    n_ctx=st.sampled_from([32_768, 131_072, 400_000]),
    n_ubatch=st.sampled_from([256, 512, 4096]),
    n_slots=st.sampled_from([1, 2, 5]),
    quantised=st.booleans(),
)
def test_representatives_take_what_all_blocks_take(
    shapes: Shapes,
    model: str,
    cuts: list[int],
    pipelined: bool,
    n_ctx: int,
    n_ubatch: int,
    n_slots: int,
    quantised: bool,
) -> None:
    shape = shapes.of(model)
    type_ = "q8_0" if quantised else "f16"
    choice = ContextChoice(
        n_ctx=n_ctx, n_slots=n_slots, n_batch=4096, n_ubatch=n_ubatch, cache_type_k=type_, cache_type_v=type_
    )
    placement = placement_of(shape, cuts, pipelined)
    few = compute_bytes(shape, choice, placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "representatives", all_of)
        everything = compute_bytes(shape, choice, placement)
    assert few == pytest.approx(everything, rel=0.03)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    n_ctx=st.integers(1, 400),
    n_ubatch=st.integers(1, 8),
    more=st.sampled_from(["n_ctx", "n_ubatch", "n_outputs_max", "pipelined"]),
)
def test_more_of_anything_never_takes_less(shapes: Shapes, model: str, n_ctx: int, n_ubatch: int, more: str) -> None:
    shape = shapes.of(model)
    choice = ContextChoice(n_ctx=1024 * n_ctx, n_slots=2, n_batch=8192, n_ubatch=256 * n_ubatch)
    placement = placement_of(shape, [shape.n_blocks // 2], False)
    larger = choice
    if more == "pipelined":
        placement_larger = replace(placement, pipelined=True)
    else:
        placement_larger = placement
        changes: dict[str, Any] = {more: 2 * getattr(choice, more) or 64}
        larger = replace(choice, **changes)
    before = compute_bytes(shape, choice, placement)
    after = compute_bytes(shape, larger, placement_larger)
    # the best fit is no perfect fit: a larger piece may find a better place, but not a much better one
    assert all(old <= 1.02 * new for old, new in zip(before, after, strict=True))


def test_retained_sequences_cost_rows_of_logits_and_nothing_else(shapes: Shapes) -> None:
    """A unified cache with room for 256 sequences: the reserved graph has a row of logits for each of them."""
    choice = ContextChoice(n_ctx=131_072, n_slots=4)
    many = replace(choice, n_seq_max=256)
    dsa, air = shapes.of("glm-5.2"), shapes.of("glm-4.5-air")
    assert many.n_outputs == 256
    (few_bytes,), (many_bytes,) = (compute_bytes(dsa, each, place_on_host(79)) for each in (choice, many))
    assert 0 <= many_bytes - few_bytes < 4096  # its peak is where the indexer scores cells, long before the logits
    (few_bytes,), (many_bytes,) = (compute_bytes(air, each, place_on_host(47)) for each in (choice, many))
    assert many_bytes - few_bytes <= 4 * 252 * air.n_vocab


def test_results_take_the_place_of_operands_that_nobody_needs() -> None:
    graph = Graph()
    start = operation(Op.OTHER, (graph_input(F32, 8),), F32, 1024)
    one = operation(Op.IN_PLACE, (start,), F32, 1024)
    two = operation(Op.IN_PLACE, (one,), F32, 1024)
    graph.expand(two)
    assert buffer_sizes(graph, [32]) == [4096 + 32]
    graph = Graph()
    start = operation(Op.OTHER, (graph_input(F32, 8),), F32, 1024)
    both = operation(Op.OTHER, (operation(Op.IN_PLACE, (start,), F32, 1024), start), F32, 1024)
    graph.expand(both)
    assert buffer_sizes(graph, [32]) == [3 * 4096 + 32]
