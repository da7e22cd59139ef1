"""Bodies that are too large, broken, deep or strange."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.body import MAX_DEPTH, decode
from server.errors import InvalidRequest
from tests.support.http import HELLO, served

CHAT = "/v1/chat/completions"


def nested(depth: int, kind: str = "list") -> str:
    """A body of exactly `depth` levels, the object itself included."""
    opener, closer = ("[", "]") if kind == "list" else ('{"a":', "}")
    return '{"x":' + opener * (depth - 1) + ("1" if kind == "dict" else "") + closer * (depth - 1) + "}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the request body is empty, but must be a JSON object"),
        (b" \n", "the request body is empty"),
        (b'{"a":1,}', "trailing comma in object (byte 7)"),
        (b'{"a":', "truncated"),
        (b'{"a":1} x', "trailing characters (byte 9)"),
        (b'{"a":NaN}', "invalid character (byte 5)"),
        (b'{"a":-Infinity}', "invalid"),
        (b'{"a":1e999}', "out of range"),
        (b'{"a":' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a":"\\ud83d"}', "is not valid JSON: a text holds half of a UTF-16 surrogate pair"),
        (b'{"a":"\\ud83d\\ude00', "truncated"),
        (b'{"a":"\xff"}', "is not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "is not valid JSON"),
        (b"[]", "must be a JSON object, but it is an array"),
        (b'"x"', "must be a JSON object, but it is a string"),
        (b"null", "must be a JSON object, but it is null"),
        (nested(MAX_DEPTH + 1).encode(), "nested too deeply; 128 levels are allowed"),
        (nested(MAX_DEPTH + 1, "dict").encode(), "nested too deeply"),
        (b'{"a":' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 1_000_000, "nested too deeply"),
    ],
)
async def test_what_is_no_body(body: bytes, words: str) -> None:
    async with served() as s:
        response = await s.http.post(CHAT, content=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_the_deepest_body(kind: str) -> None:
    assert decode(nested(MAX_DEPTH, kind).encode())


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_property_json_of_others_is_read_or_refused(value: object) -> None:
    text = json.dumps({"v": value}).encode()
    try:
        assert decode(text) == {"v": value}
    except InvalidRequest:
        # The one thing that json.dumps writes and we do not take.
        with pytest.raises(UnicodeEncodeError):
            json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=latin-1", "nonsense"],
)
async def test_the_content_type_does_not_matter(content_type: str) -> None:
    async with served() as s:
        body = json.dumps({"messages": HELLO}).encode()
        response = await s.http.post(CHAT, content=body, headers={"content-type": content_type})
        marked = await s.http.post(CHAT, content=b"\xef\xbb\xbf" + body)
    assert (response.status_code, marked.status_code) == (200, 200)


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 100

    async with served(max_body_bytes=1000) as s:
        response = await s.http.post(CHAT, content=endless(), headers={"content-length": "1001"})
        assert read <= 1
    assert response.status_code == 413
    assert "1000 bytes at most" in response.json()["error"]["message"]
    assert response.json()["error"]["reason"] == "body_too_large"


async def test_a_body_that_does_not_say_it_is_cut_off() -> None:
    read = 0

    async def chunked() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b" " * 100

    async with served(max_body_bytes=1000) as s:
        response = await s.http.post(CHAT, content=chunked())
    assert response.status_code == 413
    assert read < 100


async def test_a_body_at_the_limit_is_read() -> None:
    body = json.dumps({"messages": HELLO}).encode()
    async with served(max_body_bytes=len(body)) as s:
        assert (await s.http.post(CHAT, content=body)).status_code == 200


@pytest.mark.parametrize("size", [50_000, 100_000])
async def test_large_messages_are_just_too_long(size: int) -> None:
    async with served() as s:
        response = await s.chat(messages=[{"role": "user", "content": "x" * size}])
    assert response.status_code == 400
    assert response.json()["error"]["n_prompt_tokens"] == size
