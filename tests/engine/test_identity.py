from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from server.engine.identity import Identity, identity_of
from server.engine.options import ModelOptions
from tests.support.gguf_bytes import write_shards
from tests.support.scripted import ScriptedBackend
from tests.support.tiny_gguf import write_tiny_gguf

FACTS = ScriptedBackend().facts


def model_part(path: Path) -> bytes:
    return identity_of(ModelOptions(str(path)), FACTS).model


def test_a_copy_is_the_same_model_and_another_is_not(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "a.gguf")
    copy = tmp_path / "b.gguf"
    copy.write_bytes(first.read_bytes())
    assert model_part(first) == model_part(copy)
    other = write_tiny_gguf(tmp_path / "c.gguf", seed=2)
    assert model_part(first) != model_part(other)


def test_weights_that_differ_at_either_end_are_another_model(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "a.gguf")
    data = first.read_bytes()
    seen = {model_part(first)}
    for at in (len(data) - 1, len(data) - 100_000, data.index(b"tokenizer") + 1):
        changed = tmp_path / f"{at}.gguf"
        changed.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        seen.add(model_part(changed))
    assert len(seen) == 4


def test_every_shard_counts(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    before = model_part(shards[0])
    data = bytearray(shards[-1].read_bytes())
    data[-1] ^= 1
    shards[-1].write_bytes(data)
    assert model_part(shards[0]) != before


@pytest.mark.parametrize(
    "change", [{"flash_attn": "on"}, {"rope_scaling": "yarn"}, {"rope_freq_base": 1e6}, {"rope_freq_scale": 0.5}]
)
def test_options_that_shape_the_cache_count(change: dict[str, object], tmp_path: Path) -> None:
    path = str(write_tiny_gguf(tmp_path / "a.gguf"))
    plain, changed = ModelOptions(path), ModelOptions(path, **change)  # type: ignore[arg-type]
    ours, theirs = identity_of(plain, FACTS), identity_of(changed, FACTS)
    assert (ours.model == theirs.model, ours.settings == theirs.settings) == (True, False)
    difference = ours.difference(theirs)
    assert difference is not None
    assert "--flash-attn" in difference


@pytest.mark.parametrize(
    "change", [{"cache_type_k": "q8_0"}, {"cache_type_v": "q8_0"}, {"kv_unified": False}, {"build_info": "b1-x"}]
)
def test_facts_that_shape_the_cache_count(change: dict[str, object], tmp_path: Path) -> None:
    options = ModelOptions(str(write_tiny_gguf(tmp_path / "a.gguf")))
    other = msgspec.structs.replace(FACTS, **change)
    assert identity_of(options, FACTS).settings != identity_of(options, other).settings


def test_sizes_do_not_count(tmp_path: Path) -> None:
    options = ModelOptions(str(write_tiny_gguf(tmp_path / "a.gguf")))
    other = msgspec.structs.replace(FACTS, n_ctx=2048, n_slots=2, n_batch=32)
    assert identity_of(options, FACTS) == identity_of(options, other)


def test_the_same_is_no_difference() -> None:
    one = Identity(b"a" * 16, b"b" * 16)
    assert one.difference(Identity(b"a" * 16, b"b" * 16)) is None
