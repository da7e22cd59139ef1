from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.messages import Conversation, Message
from server.chat.volatile import without_volatile_lines

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"


def system(text: str) -> str | None:
    stable = without_volatile_lines(Conversation((Message("system", text), Message("user", "hi"))))
    return stable.messages[0].content if stable.messages[0].role == "system" else None


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (f"{HEADER}\nYou are an agent.", "You are an agent."),
        (f"{HEADER}\r\nYou are an agent.", "You are an agent."),
        (f"{HEADER}You are an agent.", "You are an agent."),
        (f"{HEADER} \nA\nB", "A\nB"),
        (f"First.\n{HEADER}\nLast.", "First.\nLast."),
        (f"First.\n{HEADER}", "First.\n"),
        (HEADER, None),
        (HEADER + "\n", None),
        (
            "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=sdk-cli; cch=eb6c6; w=cron;\nA",
            "A",
        ),
        ("x-anthropic-billing-header: cc_version=2.1.38; cc_entrypoint=cli; cch=4873d\nA", "A"),
        ("x-anthropic-billing-header: cc_version=2.1.38; cch=4873d", None),
        (f"{HEADER}a=b is the rule", "a=b is the rule"),
    ],
)
def test_the_billing_line_goes_and_the_rest_stays(text: str, rest: str | None) -> None:
    assert system(text) == rest


@pytest.mark.parametrize(
    "text",
    [
        "You are an agent.",
        f"They send '{HEADER}' with it.",
        "x-anthropic: a=b;",
        "x-anthropic-billing-header: is a=b c",
        "",
        "The time is 12:31:07.",
    ],
)
def test_all_else_stays(text: str) -> None:
    conversation = Conversation((Message("system", text), Message("user", "hi")))
    assert without_volatile_lines(conversation) is conversation


def test_only_system_prompts_are_touched() -> None:
    conversation = Conversation((Message("user", HEADER), Message("assistant", None), Message("tool", HEADER)))
    assert without_volatile_lines(conversation) is conversation
    alone = without_volatile_lines(Conversation((Message("developer", HEADER),)))
    assert alone.messages == (Message("developer", ""),)


@given(st.from_regex(r"[0-9a-f]{5}", fullmatch=True), st.from_regex(r"[0-9a-f]{5}", fullmatch=True), st.text())
def test_two_requests_of_one_client_become_equal(first: str, second: str, prompt: str) -> None:
    def sent(cch: str) -> Conversation:
        header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};\n"
        return Conversation((Message("system", header + prompt), Message("user", "hi")))

    assert without_volatile_lines(sent(first)) == without_volatile_lines(sent(second))


@given(st.text(alphabet="x-anthropic-billing-header: cch=a;\n", max_size=200))
def test_any_text_survives(text: str) -> None:
    stable = without_volatile_lines(Conversation((Message("system", text), Message("user", text))))
    assert stable.messages[-1].content == text
