from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine import state_file
from server.engine.backend import State
from server.engine.identity import Identity
from server.engine.state_file import HEADER_BYTES, Damaged, Foreign, StateFileError

OURS = Identity(b"m" * 16, b"s" * 16)
TOKENS = [5, 6, 7, 154879, 0, 9]
STATE: State = np.arange(100, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.state"
    assert state_file.write(path, OURS, TOKENS, 2, STATE) == path.stat().st_size == HEADER_BYTES + 4 * 6 + 100
    return path


def test_what_was_written_is_read(file: Path) -> None:
    head, state = state_file.read(file, OURS)
    assert (head.identity, head.tokens.tolist(), head.start, head.n_state_bytes) == (OURS, TOKENS, 2, 100)
    assert head.n_bytes == file.stat().st_size
    assert np.array_equal(state, STATE)
    assert state_file.read_head(file, OURS) == head


def test_nobody_else_may_read_it_and_nothing_is_left_beside_it(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["a.state"]


# Where each part begins: one wrong bit anywhere in it is noticed.
PARTS = {
    "magic": range(8),
    "version": range(8, 12),
    "number of tokens": range(12, 16),
    "first token": range(16, 20),
    "zero": range(20, 24),
    "bytes of the state": range(24, 32),
    "model": range(32, 48),
    "settings": range(48, 64),
    "digest of the state": range(64, 96),
    "digest of the head": range(96, HEADER_BYTES),
    "tokens": range(HEADER_BYTES, HEADER_BYTES + 24),
    "state": range(HEADER_BYTES + 24, HEADER_BYTES + 124),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_bit_anywhere_is_refused(part: str, file: Path) -> None:
    good = file.read_bytes()
    for at in PARTS[part]:
        for bit in (0, 7):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            file.write_bytes(bad)
            with pytest.raises(StateFileError):
                state_file.read(file, OURS)
            if part != "state":
                with pytest.raises(StateFileError):
                    state_file.read_head(file, OURS)
    file.write_bytes(good)
    state_file.read(file, OURS)


def test_the_parts_are_the_whole_file(file: Path) -> None:
    assert [at for part in PARTS.values() for at in part] == list(range(file.stat().st_size))


@pytest.mark.parametrize("size", [0, 1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 23, HEADER_BYTES + 123])
def test_a_cut_file_is_refused(size: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(Damaged):
        state_file.read_head(file, OURS)


def test_a_longer_file_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(Damaged, match="bytes are not what its header says"):
        state_file.read_head(file, OURS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), keep=st.integers(0, HEADER_BYTES))
def test_garbage_is_refused_and_costs_no_memory(data: bytes, keep: int, file: Path) -> None:
    bad = file.with_name("garbage")
    bad.write_bytes(file.read_bytes()[:keep] + data)
    with pytest.raises(StateFileError):
        state_file.read(bad, OURS)


@pytest.mark.parametrize(
    ("other", "words"),
    [(Identity(b"x" * 16, OURS.settings), "of another model"), (Identity(OURS.model, b"x" * 16), "--cache-type-k")],
)
def test_a_file_of_others_is_refused_in_words(other: Identity, words: str, file: Path) -> None:
    with pytest.raises(Foreign, match=words):
        state_file.read(file, other)


def test_links_and_pipes_are_not_read(file: Path) -> None:
    link, pipe = file.with_name("link"), file.with_name("pipe")
    link.symlink_to(file)
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="symbolic links"):
        state_file.read(link, OURS)
    with pytest.raises(Damaged, match="no plain file"):
        state_file.read(pipe, OURS)


def test_a_link_is_replaced_and_not_followed(file: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    link = file.with_name("link")
    link.symlink_to(outside)
    state_file.write(link, OURS, TOKENS, 0, STATE)
    assert outside.read_text() == "precious"
    assert not link.is_symlink()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder.state").mkdir()
    (tmp_path / "folder.state" / "full").touch()
    with pytest.raises(OSError, match="directory"):
        state_file.write(tmp_path / "folder.state", OURS, TOKENS, 0, STATE)
    assert os.listdir(tmp_path) == ["folder.state"]
