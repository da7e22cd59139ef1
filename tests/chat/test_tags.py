"""The tag scanner: every tag found wherever the text is cut, and nothing kept back that cannot become one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.tags import CALL_TAGS, TEXT_TAGS, Tag, TagScanner, Token

ALL_TAGS = TEXT_TAGS | CALL_TAGS
LONGEST = max(len(tag.value) for tag in ALL_TAGS)

texts = st.lists(
    st.one_of(
        st.sampled_from([tag.value for tag in Tag]),
        st.sampled_from([tag.value[:-1] for tag in Tag]),
        st.sampled_from(["<", ">", "</", "<|", "a", " ", "<b>", "é"]),
    ),
    max_size=12,
).map("".join)


def scan(pieces: Iterable[str], tags: Iterable[Tag] = ALL_TAGS) -> list[Token]:
    """All tokens, pieces of text that touch joined."""
    scanner = TagScanner(tags)
    tokens = [token for piece in pieces for token in scanner.scan(piece)]
    if tail := scanner.flush():
        tokens.append((None, tail))
    joined: list[Token] = []
    for tag, text in tokens:
        if tag is None and joined and joined[-1][0] is None:
            joined[-1] = (None, joined[-1][1] + text)
        else:
            joined.append((tag, text))
    return joined


@pytest.mark.parametrize("tag", ALL_TAGS, ids=lambda tag: tag.name)
def test_every_tag_is_found_in_text_and_at_its_edges(tag: Tag) -> None:
    assert scan([f"a{tag.value}b"]) == [(None, "a"), (tag, tag.value), (None, "b")]
    assert scan(tag.value * 2) == [(tag, tag.value)] * 2


@pytest.mark.parametrize(
    "text",
    ["<", "a < b", "<thinking>", "</thought", "<tool>", "<|useful|>", "< think>", "<arg_key >", "<<<", "1 <|> 2"],
)
def test_what_only_looks_like_a_tag_is_text(text: str) -> None:
    assert scan(text) == [(None, text)]


def test_a_tag_right_behind_half_a_tag_is_found() -> None:
    assert scan(["<think<think><"]) == [(None, "<think"), (Tag.THINK_OPEN, "<think>"), (None, "<")]


def test_tags_that_do_not_count_are_text_and_not_kept_back() -> None:
    scanner = TagScanner(TEXT_TAGS)
    assert scanner.scan("<tool_call") == [(None, "<tool_call")]
    assert scanner.held == ""


@pytest.mark.parametrize("text", ["see </think", "see <|endof"])
def test_only_the_start_of_a_tag_is_kept_back(text: str) -> None:
    scanner = TagScanner(ALL_TAGS)
    assert scanner.scan(text) == [(None, "see ")]
    assert scanner.held == text.removeprefix("see ")
    assert scanner.scan(" x") == [(None, text.removeprefix("see ") + " x")]


@given(texts, st.data())
def test_cutting_changes_nothing_and_no_character_is_lost(text: str, data: st.DataObject) -> None:
    whole = scan([text])
    assert "".join(part for _, part in whole) == text
    assert scan(text) == whole
    at = data.draw(st.integers(0, len(text)))
    assert scan([text[:at], text[at:]]) == whole


@given(texts)
def test_less_than_a_tag_is_ever_kept_back(text: str) -> None:
    scanner = TagScanner(ALL_TAGS)
    for character in text:
        scanner.scan(character)
        assert len(scanner.held) < LONGEST
