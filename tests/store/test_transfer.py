"""How the bytes of a file are shared out between connections."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.store.http_range import Link, Source
from server.store.pace import Pace
from server.store.part import Identity, open_part
from server.store.transfer import Transfer, TransferOptions, _Piece, _Work

LEAST = 4


def test_the_first_bytes_go_first() -> None:
    work = _Work(threading.Lock(), [(0, 10), (10, 20)])
    first = work.take(LEAST)
    assert first == _Piece(0, 10)
    assert work.take(LEAST) == _Piece(10, 20)


def test_an_idle_connection_takes_half_of_the_longest() -> None:
    work = _Work(threading.Lock(), [(0, 100), (100, 120)])
    long, short = work.take(LEAST), work.take(LEAST)
    assert long is not None
    assert short is not None
    long.at = 20
    assert work.take(LEAST) == _Piece(60, 100)
    assert (long.at, long.stop) == (20, 60)
    long.at, short.at = 57, 118
    for piece in work.going[2:]:
        piece.at = piece.stop - 7
    assert work.take(LEAST) is None  # what is left is too little to share


@pytest.mark.parametrize(("size_mib", "n_pieces"), [(0, 0), (1, 1), (6, 6), (64, 16), (512, 16), (1024, 32)])
def test_a_small_file_is_for_all_connections_too(tmp_path: Path, size_mib: int, n_pieces: int) -> None:
    part, _ = open_part(tmp_path / "m.gguf", Identity(size_mib << 20, "a" * 64, "c0ffee"))
    link = Link(Source("http://127.0.0.1:9/m.gguf", "m.gguf", size_mib << 20, None, None))
    transfer = Transfer(part, link, TransferOptions(connections=8), Pace(None), lambda reason, wait_s: None)
    assert len(transfer._work.waiting) == n_pieces
    part.close()


@given(st.data())
def test_no_byte_is_lost_or_got_by_two(data: st.DataObject) -> None:
    """Connections that get some of their piece, fail, and take again, in any order."""
    size = 200
    work = _Work(threading.Lock(), [(at, min(at + 32, size)) for at in range(0, size, 32)])
    got = [0] * size
    going: list[_Piece] = []
    for _ in range(2000):
        if len(going) < 3 and (piece := work.take(LEAST)) is not None:
            going.append(piece)
        if not going:
            break
        piece = data.draw(st.sampled_from(going))
        n = data.draw(st.integers(1, 16))
        for at in range(piece.at, min(piece.at + n, piece.stop)):
            got[at] += 1
        piece.at = min(piece.at + n, piece.stop)
        if piece.at == piece.stop or data.draw(st.booleans()):
            work.give_back(piece)
            going.remove(piece)
    assert got == [1] * size
