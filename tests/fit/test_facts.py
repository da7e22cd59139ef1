"""Facts of real small models, from their headers."""

from __future__ import annotations

from server.fit.facts import read_shape, without_nextn
from server.store.source import resolve_model, tiny_glm_model


def test_tiny_glm_has_latent_attention_two_kinds_of_indexer_and_a_block_that_drafts() -> None:
    shape = read_shape(resolve_model(tiny_glm_model()).headers)
    assert shape.architecture == "glm-dsa"
    assert shape.is_latent
    assert [block.is_nextn for block in shape.blocks] == [False] * 5 + [True]
    assert {(block.kept.k_values, block.kept.v_values) for block in shape.blocks} == {(128, 0)}
    assert {block.kept.indexer_values for block in shape.trunk} == {0, 64}
    assert shape.nextn[0].kept.indexer_values == 0
    assert shape.nextn[0].weights.nextn > 0
    assert without_nextn(shape).nextn[0].weights.total == 0
    n_bytes = sum(block.weights.total for block in shape.blocks) + shape.token_embd_bytes + shape.output_bytes
    assert n_bytes + shape.other_bytes == sum(
        tensor.n_bytes or 0 for header in resolve_model(tiny_glm_model()).headers for tensor in header.tensors
    )
