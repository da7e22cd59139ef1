"""JSON text: always valid, strings quotable in parts, numbers left as they were spelt."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.json_text import kind_of, quote, quote_part, read, write

any_text = st.text(st.characters(codec=None))


@given(any_text)
def test_a_quoted_text_reads_back_and_can_be_encoded(text: str) -> None:
    quoted = quote(text)
    quoted.encode()
    assert json.loads(quoted) == text


@given(st.lists(st.text()))
def test_parts_quoted_one_after_the_other_are_the_whole_quoted(parts: list[str]) -> None:
    assert "".join(map(quote_part, parts)) == quote_part("".join(parts))


def test_non_ascii_stays_readable() -> None:
    assert quote("天气 🌦 é") == '"天气 🌦 é"'
    assert write({"城": ["é"]}) == '{"城": ["é"]}'


def test_half_a_surrogate_pair_is_escaped() -> None:
    assert write(["\ud83c"]) == '["\\ud83c"]'
    assert quote("\udf89") == '"\\udf89"'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0", "integer"),
        ("-17", "integer"),
        ("9" * 20_000, "integer"),
        ("1.50", "number"),
        ("2e9", "number"),
        ("true", "boolean"),
        ("null", "null"),
        ('"x"', "string"),
        ('["a", {"b": 1e400}]', "array"),
        ('{"a": [1]}', "object"),
        ("", None),
        ("-", None),
        ("007", None),
        ("1_0", None),
        ("1.", None),
        (".5", None),
        ("+5", None),
        ("١٢", None),
        ("NaN", None),
        ("[NaN]", None),
        ('{"a": -Infinity}', None),
        ("True", None),
        ("nullify", None),
        ("{}{}", None),
        ('{"a"', None),
        (" 1", None),
        ("{} ", None),
        ("x", None),
        ("[" * 200_000, None),
    ],
)
def test_kinds(text: str, kind: str | None) -> None:
    assert kind_of(text) == kind


@pytest.mark.parametrize("text", ["{", "NaN", '{"a": Infinity}', "[" * 200_000, "9" * 20_000])
def test_what_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_raw_line_breaks_in_strings_are_read_where_allowed() -> None:
    assert read('{"a": "b\nc"}', strict=False) == {"a": "b\nc"}
    with pytest.raises(ValueError):
        read('{"a": "b\nc"}')


def test_what_json_cannot_say_is_a_value_error() -> None:
    deep: list[object] = []
    for _ in range(200_000):
        deep = [deep]
    for value in (float("nan"), deep):
        with pytest.raises(ValueError):
            write(value)
    while deep:  # taken apart by hand: the interpreter would recurse
        deep = deep.pop()  # type: ignore[assignment]
