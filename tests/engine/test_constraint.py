from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from server.engine.constraint import MOST_KEPT, ConstraintCompiler, Forbidden, MaskBuffer, TokenTable
from server.engine.messages import Constraint
from server.errors import InvalidRequest
from tests.support.token_tables import glm_table

TABLE = glm_table([b"yes", b"no", b" \n"])


def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(lambda: TABLE)


def allowed(mask: NDArray[np.bool_]) -> set[bytes]:
    return {TABLE.pieces[int(i)] for i in np.flatnonzero(mask)}


def test_the_first_mask_has_every_way_to_begin() -> None:
    compiled = compiler().prepare(Constraint('start: "yes" | "no" | <tool_call>'))
    assert allowed(compiled.first_mask) == {b"yes", b"no", b"y", b"n", b"<tool_call>"}


def test_special_tokens_are_never_text() -> None:
    compiled = compiler().prepare(Constraint("start: /(?s:.+)/"))
    assert allowed(compiled.first_mask).isdisjoint(TABLE.pieces[i] for i in TABLE.special)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: /(/", "invalid regex"),
        ("start: other", "other"),
        ("start: <no_such_token>", "no_such_token"),
        ('start: %json {"type": "string", "pattern": "(?=a)"}', "regex parse error"),
        ('start: %json {"not": {}}', 'Unimplemented keys: ["not"]'),
        ("", "Empty grammar"),
    ],
)
def test_a_wrong_grammar_is_refused_in_a_line(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler().prepare(Constraint(grammar))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_warnings_say_what_is_left_out() -> None:
    grammar = 'start: %json {"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'
    assert compiler().prepare(Constraint(grammar)).warnings == ('Unimplemented keys: ["uniqueItems"]',)


def test_parsers_are_kept_but_not_for_ever() -> None:
    made = compiler()
    first = made.prepare(Constraint('start: "0"'))
    for i in range(1, MOST_KEPT):
        made.prepare(Constraint(f'start: "{i}"'))
    assert made.prepare(Constraint('start: "0"')) is first
    for i in range(MOST_KEPT):
        made.prepare(Constraint(f'start: "again {i}"'))
    assert made.prepare(Constraint('start: "0"')) is not first


def test_the_vocabulary_is_read_once_whoever_comes_first() -> None:
    calls = []

    def table() -> TokenTable:
        calls.append(threading.current_thread().name)
        return TABLE

    made = ConstraintCompiler(table)
    threads = [threading.Thread(target=made.warm_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.prepare(Constraint('start: "x"'))
    assert len(calls) == 1


def test_masks_are_fresh_arrays() -> None:
    parser = compiler().prepare(Constraint('start: "yes"')).parser
    buffer = MaskBuffer(TABLE.n_tokens)
    first = buffer.fill(parser)
    first[:] = False
    assert allowed(buffer.fill(parser)) == {b"y"}, "text that is forced is cut as the tokenizer cuts it"


def test_blanks() -> None:
    assert {TABLE.pieces[int(i)] for i in TABLE.blanks} == {b" ", b"\t", b"\r", b"\n", b" \n"}


def spells(forbidden: Forbidden, *pieces: bytes) -> bool:
    tail = b""
    for piece in pieces:
        if forbidden.is_spelt(tail, piece):
            return True
        tail = forbidden.tail_of(tail, piece)
    return False


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"<end>"], True),
        ([b"<", b"end", b">"], True),
        ([b"text <e", b"nd> more"], True),
        ([b"<end", b" >"], False),
        ([b"a < b", b"c", b"<end>"], True),
        ([b"<first>"], True),
        ([b"x", b"<first>"], False),
        ([b"x<first>"], False),
        ([b"<x", b"<first>"], False),
        ([b"y" * 5000, b"<end", b">"], True),
        ([b"<" + b"y" * 5000, b"<end", b">"], True),
        ([b"plain", b" text"], False),
    ],
)
def test_forbidden_texts_are_found_over_the_borders_of_tokens(pieces: list[bytes], expected: bool) -> None:
    assert spells(Forbidden(["<end>", r"\A<first>"]), *pieces) is expected
