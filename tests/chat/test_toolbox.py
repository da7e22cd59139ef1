"""Finding offered tools by name, by the start of a name, and inside text."""

from __future__ import annotations

import pytest

from server.chat.messages import Tool
from server.chat.toolbox import Toolbox, is_gap, is_plausible_name, skip_gap, strip_gap


def tool(name: str, *keys: str) -> Tool:
    return Tool(name, {"type": "object", "properties": {key: {} for key in keys}}, {})


TOOLS = Toolbox([tool("send", "parcel", "_mailbox"), tool("send_mail", "to"), tool("查询", "城市")])


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\\n", " \\n \\t\n"])
def test_gaps(text: str) -> None:
    assert is_gap(text)
    assert strip_gap(f"{text}a b{text}") == "a b"
    assert skip_gap(f"{text}a") == len(text)


@pytest.mark.parametrize("text", ["\\", "\\x", "a", " \\"])
def test_no_gaps(text: str) -> None:
    assert not is_gap(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" send\n", "send"),
        ("`send`", "send"),
        ("functions.send", "send"),
        ("send:", "send"),
        ("functions.x", "functions.x"),
    ],
)
def test_names_are_freed_of_what_is_around_them(text: str, name: str) -> None:
    assert TOOLS.clean_name(text) == name


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("sendparcel", ("send", "parcel")),
        ("send_mailto", ("send_mail", "to")),
        ("send_mailxyz", ("send_mail", "xyz")),
        ("send_mailbox", ("send", "_mailbox")),  # the longest would leave a key that nobody declared
        ("send parcel", ("send", "parcel")),
        ("查询城市", ("查询", "城市")),
        ("send", None),
        ("post", None),
    ],
)
def test_a_name_glued_to_a_key_is_split_at_the_longest(text: str, split: tuple[str, str] | None) -> None:
    assert TOOLS.split_glued(text) == split


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("now send", "send"),
        ("send_mail", "send_mail"),
        ("resend", None),
        ("x.send", None),
        ("先查询", "查询"),
        ("用send", "send"),
    ],
)
def test_a_name_at_the_end_of_text(text: str, name: str | None) -> None:
    assert TOOLS.name_at_end(text) == name


@pytest.mark.parametrize(
    ("text", "before", "held"),
    [
        ("I will se", "", "se"),
        ("send_m", "", "send_m"),
        ("send_mail", "", "send_mail"),
        ("sendx", "", ""),
        ("s", "the", ""),  # inside a word that was sent already
        ("s", "the ", "s"),
        ("nothing here", "", ""),
        ("先查", "", "查"),
    ],
)
def test_only_what_may_become_a_name_is_held(text: str, before: str, held: str) -> None:
    assert text[TOOLS.held_from(text, before) :] == held


def test_plausible_names() -> None:
    assert is_plausible_name("mcp__desk__get_app.state-v2")
    assert not is_plausible_name("two words")
    assert not is_plausible_name("a<b")
    assert not is_plausible_name("x" * 200)


def test_a_tool_that_was_not_offered_declares_nothing() -> None:
    assert TOOLS.schema("launch").declared == frozenset()
    assert "launch" not in TOOLS
    assert not Toolbox([])
