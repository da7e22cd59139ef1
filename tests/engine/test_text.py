from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.text import Piece, Stopped, StopScanner, TextStream


def run(stops: list[str], pieces: list[bytes]) -> tuple[str, str | None]:
    stream = TextStream(stops)
    out: list[str] = []
    for piece in pieces:
        got = stream.feed(piece)
        out.append(got.text)
        if got.stop_text is not None:
            return "".join(out), got.stop_text
    out.append(stream.finish().text)
    return "".join(out), None


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "hello", ("hello", None)),
        (["END"], "so be it END and more", ("so be it ", "END")),
        (["END"], "so be it EN", ("so be it EN", None)),
        (["EN", "END"], "so END", ("so ", "EN")),
        (["b", "abc"], "xabc", ("xa", "b")),
        (["c", "abc"], "xabc", ("x", "abc")),
        (["\n\n"], "a\n\nb", ("a", "\n\n")),
        (["终"], "开始终点", ("开始", "终")),
        ([""], "never stops", ("never stops", None)),
    ],
)
def test_stop_is_the_same_whole_and_byte_by_byte(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    data = text.encode()
    assert run(stops, [data]) == expected
    assert run(stops, [data[i : i + 1] for i in range(len(data))]) == expected


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    st.text(alphabet="abcé漢", max_size=40),
    st.data(),
)
def test_any_cut_gives_the_same_text(stops: list[str], text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    bounds = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(stops, pieces) == run(stops, [raw])


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream([])
    assert stream.feed("漢".encode()[:2]) == Piece("", 0)
    assert stream.feed("漢".encode()[2:]) == Piece("漢", 2)


def test_half_a_character_at_the_end_is_dropped() -> None:
    stream = TextStream([])
    assert stream.feed(b"ok" + "漢".encode()[:1]).text == "ok"
    assert stream.finish() == Piece("", 0)


def test_invalid_bytes_become_replacement_characters() -> None:
    assert run([], [b"a\xff", b"b"]) == ("a\N{REPLACEMENT CHARACTER}b", None)


def test_tokens_are_counted_once_and_those_of_the_stop_string_not_at_all() -> None:
    stream = TextStream(["STOP"])
    assert stream.feed(b"one ") == Piece("one ", 1)
    assert stream.feed(b"two S") == Piece("two ", 1)
    assert stream.feed(b"TO") == Piece("", 0)
    assert stream.feed(b"P") == Piece("", 0, "STOP")


def test_a_token_that_reaches_into_the_stop_string_counts() -> None:
    stream = TextStream(["STOP"])
    assert stream.feed(b"S") == Piece("", 0)
    assert stream.feed(b"O STO") == Piece("SO ", 2)
    assert stream.feed(b"P") == Piece("", 0, "STOP")


def test_held_tail_is_bounded() -> None:
    scanner = StopScanner(["aaab"])
    emitted = 0
    for _ in range(1000):
        got = scanner.feed("a")
        assert not isinstance(got, Stopped)
        emitted += len(got)
    assert emitted == 997
    assert scanner.flush() == "aaa"


def test_half_a_character_is_noticed() -> None:
    stream = TextStream([])
    seen = [(stream.feed(bytes([byte])), stream.within_character)[1] for byte in "a\N{EURO SIGN}b".encode()]
    assert seen == [False, True, True, False, False]
