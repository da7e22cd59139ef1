"""Facts of real small models, from their headers."""

from __future__ import annotations

from pathlib import Path

from server.fit.facts import read_shape
from server.gguf import read_header_from
from server.store.source import resolve_model, tiny_glm_model
from tests.support.shapes import write_shape


def test_tiny_glm_has_latent_attention_two_kinds_of_indexer_and_a_block_that_drafts() -> None:
    shape = read_shape(resolve_model(tiny_glm_model()).headers)
    assert shape.architecture == "glm-dsa"
    assert shape.is_latent
    assert [block.is_nextn for block in shape.blocks] == [False] * 5 + [True]
    assert {(block.kept.k_values, block.kept.v_values) for block in shape.blocks} == {(128, 0)}
    assert {block.kept.indexer_values for block in shape.trunk} == {0, 64}
    assert shape.nextn[0].kept.indexer_values == 0
    assert shape.nextn[0].weights.nextn > 0
    n_bytes = sum(block.weights.total for block in shape.blocks) + shape.token_embd_bytes + shape.output_bytes
    assert n_bytes + shape.other_bytes == sum(
        tensor.n_bytes or 0 for header in resolve_model(tiny_glm_model()).headers for tensor in header.tensors
    )


class Far:
    """A file on another machine: what is asked for is counted."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.n_asked = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._path.stat().st_size if whence == 2 else 0)
        return self._at

    def read(self, size: int) -> bytes:
        self.n_asked += size
        with open(self._path, "rb") as file:
            file.seek(self._at)
            return file.read(size)


def test_eleven_shards_with_a_real_tokenizer_tell_their_facts_in_a_few_megabytes(tmp_path: Path) -> None:
    first = write_shape(tmp_path, "glm-5.2", n_shards=11, vocabulary=True)
    files = [Far(path) for path in sorted(first.parent.glob("*.gguf"))]
    shape = read_shape([read_header_from(file, "far") for file in files])
    assert len(files) == 11
    assert shape.n_params == 753_864_132_864
    assert shape.n_vocab == 154_880
    assert sum(file.n_asked for file in files) < 20 << 20
    assert all(file.n_asked <= 64 << 10 for file in files[1:])
