"""What a request may ask about the reading of its answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.glm import GlmParser
from server.chat.glm_generation import Generation
from server.chat.messages import ContentDelta, Delta, EndOfText, ReasoningDelta, Tool, ToolCallArguments, fold
from server.chat.options import ReasoningFormat
from server.chat.turn import TurnReader

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = (Tool("get", {}, {}), Tool("write", TEXT, {}))
GET = "<tool_call>get</tool_call>"
FORMATS = (ReasoningFormat.NONE, ReasoningFormat.DEEPSEEK_LEGACY)


def reader(*, thinks: bool = True, shows: ReasoningFormat = ReasoningFormat.AUTO, parallel: bool = True) -> TurnReader:
    parser = GlmParser(TOOLS, start_in_reasoning=thinks, generation=Generation.GLM_5_2)
    return TurnReader(parser, reasoning_format=shows, parallel_tool_calls=parallel)


def read(of: TurnReader, *pieces: str, end: EndOfText = EndOfText.STOP) -> list[Delta]:
    """Each piece is one token."""
    return [delta for piece in pieces for delta in of.feed(piece, 1)] + of.finish(end)


# ── where reasoning is shown ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("thinks", "pieces", "content"),
    [
        (True, ("Hm", "m", "</think>", "Yes"), "<think>Hmm</think>Yes"),
        (True, ("</think>", "Yes"), "Yes"),
        (False, ("Yes",), "Yes"),
        (False, ("<think>", "Hm", "</think>", "Yes"), "<think>Hm</think>Yes"),
        (True, ("Hm", "</think>", GET), "<think>Hm</think>"),
        (True, ("Yes", "."), "<think>Yes."),  # never closed: the fold of the other formats calls it content
        (False, ("Hm", "</think>", "Yes"), "Hm</think>Yes"),  # never opened
        (True, ("Hm", "</think>", "Yes", "<think>", "no", "</think>", "No"), "<think>Hm</think>Yes<think>no</think>No"),
    ],
)
def test_reasoning_left_in_the_content(thinks: bool, pieces: tuple[str, ...], content: str) -> None:
    turn = fold(read(reader(thinks=thinks, shows=ReasoningFormat.NONE), *pieces))
    assert (turn.reasoning, turn.content) == ("", content)


def test_reasoning_in_both_places() -> None:
    legacy = ReasoningFormat.DEEPSEEK_LEGACY
    turn = fold(read(reader(shows=legacy), "Hm", "m", "</think>", "Yes"))
    assert (turn.reasoning, turn.content) == ("Hmm", "<think>Hmm</think>Yes")
    turn = fold(read(reader(thinks=False, shows=legacy), "Hm", "</think>", "Yes"))
    assert (turn.reasoning, turn.content) == ("Hm", "Hm</think>Yes")
    turn = fold(read(reader(shows=legacy), "Yes", "."))
    assert turn.reasoning == ""


@given(st.lists(st.sampled_from(["a", " ", "\n", "<think>", "</think>", GET, "<tool_call>"])), st.booleans())
def test_the_stream_of_content_is_its_fold_where_tags_are_kept(pieces: list[str], thinks: bool) -> None:
    """Nothing is ever taken back, so what was streamed stands."""
    deltas = read(reader(thinks=thinks, shows=ReasoningFormat.NONE), *pieces)
    assert not any(isinstance(delta, ReasoningDelta) for delta in deltas)
    streamed = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    assert streamed == fold(deltas).content


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cut", [(GET + GET,), (GET, GET), (GET, "<tool_call>", "get"), (GET, " and ", "<tool_call>")])
def test_one_call_is_enough_where_no_more_are_wanted(cut: tuple[str, ...]) -> None:
    one = reader(thinks=False, parallel=False)
    deltas = [delta for piece in cut for delta in one.feed(piece, 1)]
    assert one.is_over
    assert one.feed("more", 1) == one.finish(EndOfText.STOP) == []
    assert [call.name for call in fold(deltas).tool_calls] == ["get"]
    assert one.has_tool_calls


def test_text_after_a_single_call_is_no_second_call() -> None:
    one = reader(thinks=False, parallel=False)
    turn = fold(read(one, "I look. ", GET, " Done."))
    assert (turn.content.split(), len(turn.tool_calls)) == (["I", "look.", "Done."], 1)


def test_a_call_that_was_given_up_is_none() -> None:
    cut = reader(thinks=False)
    deltas = read(cut, "<tool_call>write<arg_key>text</arg_key><arg_value>", "x" * 5000, end=EndOfText.LENGTH)
    assert any(isinstance(delta, ToolCallArguments) for delta in deltas), "a long text is sent while it comes"
    assert not cut.has_tool_calls
    assert fold(deltas).tool_calls == ()


def test_a_role_tag_ends_the_turn() -> None:
    over = reader(thinks=False)
    assert fold(over.feed("Yes<|user|>And?", 1)).content == "Yes"
    assert over.is_over
    assert over.finish(EndOfText.STOP) == []


# ── which tokens were reasoning ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("thinks", "pieces", "n"),
    [
        (True, ("Hm", "m", "</think>", "Yes"), 2),  # the opening tag stands in the prompt
        (False, ("Yes",), 0),
        (False, ("<think>", "Hm", "m", "</think>", "Yes"), 2),
        (True, ("Yes", "."), 0),  # it was the answer after all
        (False, ("Hm", "m", "</think>", "Yes"), 2),  # it was reasoning after all
        (True, ("Hm", "<tool_call>", "get", "</tool_call>"), 1),  # the call ends the reasoning
        (True, ("Hm", "<tool_call>", "get", "</tool_call>", "no", "</think>", "Yes"), 5),  # a draft
        (True, ("Hm", "<tool_call>", " tag", "</think>", "Yes"), 3),
        (True, ("Hm", "<tool_call>", "get", "</tool_call>", "<|observation|>"), 1),
    ],
)
def test_reasoning_is_counted_from_the_start_state(thinks: bool, pieces: tuple[str, ...], n: int) -> None:
    counted = reader(thinks=thinks)
    read(counted, *pieces)
    assert counted.n_reasoning == n


def test_an_answer_that_is_cut_while_thinking() -> None:
    cut = reader()
    read(cut, "Hm", "m", "<tool_call>", "ge", end=EndOfText.LENGTH)
    assert cut.n_reasoning == 4


def test_tokens_that_come_together_are_shared_by_their_text() -> None:
    together = reader()
    together.feed("abcd</think>efgh", 5)  # two tokens of each text and the tag
    together.feed("ijkl", 3)
    assert together.n_reasoning == 2
