"""Python's spelling of values becomes JSON; what is no single literal becomes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.python_literals import python_to_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_what_python_prints_reads_back(value: object) -> None:
    text = python_to_json(repr(value))
    assert text is not None
    assert json.loads(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': True, 'b': None,}", '{"a": true, "b": null}'),
        ("('x', (1,), )", '["x", [1]]'),
        ("{1: 'x', None: 2}", '{"1": "x", "null": 2}'),
        ("[2.50, -0, 1e3]", "[2.50, -0, 1e3]"),
        (r"'\'\"\\\n\x41\u00e9\q'", '"\'\\"\\\\\\nAé\\\\q"'),
        ('{"already": [true, false, null]}', '{"already": [true, false, null]}'),
        (" [ ] ", "[]"),
    ],
)
def test_spellings(text: str, expected: str) -> None:
    assert python_to_json(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "{'a'}", "{'a': }", "[1, , 2]", "[1 2]", "{'a': 01}", "[1", "'open", "'\\", "['\\x4']", "{} {}"),
        *("Trueish", "nan", "[" * 100_000, "{'a': " * 100_000, "['\\U00110000']"),
    ],
)
def test_what_is_no_literal(text: str) -> None:
    assert python_to_json(text) is None
