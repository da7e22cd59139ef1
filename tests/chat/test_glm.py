"""What the GLM parser sends, and when. What it makes of a text is in cases/glm.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pytest

from server.chat.call_writer import STREAM_FROM
from server.chat.glm import GlmDialect, GlmParser
from server.chat.glm_generation import Generation
from server.chat.messages import (
    ContentDelta,
    Delta,
    EndOfText,
    Prompt,
    PromptSpan,
    ReasoningDelta,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    fold,
)

NOTE = Tool(
    "save_note",
    {
        "type": "object",
        "properties": {"title": {"type": "string"}, "text": {"type": "string"}, "tags": {"type": "array"}},
        "required": ["title", "text"],
    },
    {},
)
TIDE = Tool("tide_table", {}, {})
TOOLS = (NOTE, TIDE)
CALL = "<tool_call>tide_table</tool_call>"
LONG = 'word "quoted" é \n' * 400
START_OF_LONG = "<tool_call>save_note<arg_key>title</arg_key><arg_value>t</arg_value><arg_key>text</arg_key><arg_value>"


def parser(
    *, thinks: bool = False, tools: Sequence[Tool] = TOOLS, generation: Generation = Generation.GLM_5_2
) -> GlmParser:
    ids = iter(f"call_{number}" for number in range(1000))
    return GlmParser(tools, start_in_reasoning=thinks, generation=generation, new_id=lambda: next(ids))


def feed(reader: GlmParser, pieces: Iterable[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in reader.feed(piece)]


def shown(deltas: Iterable[Delta]) -> str:
    """All text that a client has seen so far."""
    return "".join(
        delta.fragment
        if isinstance(delta, ToolCallArguments)
        else ""
        if isinstance(delta, ToolCallStart)
        else delta.text
        for delta in deltas
    )


# ── text comes as soon as it can ─────────────────────────────────────────────────────────────────────────────────────


def test_reasoning_and_text_are_sent_piece_by_piece() -> None:
    reader = parser(thinks=True)
    assert [reader.feed(piece) for piece in ("Let", " me", " see", ".</think>", "\n\n", "It", " is", " so")] == [
        [ReasoningDelta("Let")],
        [ReasoningDelta(" me")],
        [ReasoningDelta(" see")],
        [ReasoningDelta(".")],
        [],
        [ContentDelta("It")],
        [ContentDelta(" is")],
        [ContentDelta(" so")],
    ]


def test_only_what_may_be_a_tag_is_kept_back() -> None:
    reader = parser(thinks=True)
    assert feed(reader, ["a", "b <"]) == [ReasoningDelta("a"), ReasoningDelta("b ")]
    assert feed(reader, ["/thin"]) == []
    assert feed(reader, ["g"]) == [ReasoningDelta("</thing")]


def test_blanks_wait_for_what_follows() -> None:
    reader = parser()
    assert feed(reader, ["Well,\n"]) == [ContentDelta("Well,")]
    assert feed(reader, ["\n"]) == []
    assert feed(reader, ["then"]) == [ContentDelta("\n\nthen")]
    assert reader.finish(EndOfText.STOP) == []


def test_the_name_of_a_tool_waits_in_case_its_opener_is_lost() -> None:
    reader = parser()
    assert feed(reader, ["Use tide"]) == [ContentDelta("Use")]
    assert feed(reader, ["_table"]) == []
    assert feed(reader, [" now"]) == [ContentDelta(" tide_table now")]


def test_without_tools_nothing_of_a_call_is_kept_back() -> None:
    reader = parser(tools=())
    assert shown(feed(reader, ["see <tool_call>tide_table<arg_k"])) == "see <tool_call>tide_table<arg_k"


def test_prose_about_the_tag_does_not_stall() -> None:
    text = "A call is put in <tool_call> tags by the model, and then "
    assert shown(feed(parser(), list(text))) == text.rstrip()
    assert shown(feed(parser(thinks=True), list(text))) == text


# ── tool calls on the wire ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_is_a_start_and_then_its_arguments() -> None:
    text = START_OF_LONG + "x</arg_value><arg_key>tags</arg_key><arg_value>[1]</arg_value></tool_call>" + CALL
    expected = [
        ToolCallStart(0, "call_0", "save_note"),
        ToolCallArguments(0, '{"title": "t", "text": "x", "tags": [1]}'),
        ToolCallStart(1, "call_1", "tide_table"),
        ToolCallArguments(1, "{}"),
    ]
    for pieces in ([text], list(text)):
        reader = parser()
        assert feed(reader, pieces) == expected
        assert reader.finish(EndOfText.STOP) == []


def test_nothing_of_a_short_call_is_sent_before_its_end() -> None:
    reader = parser()
    assert feed(reader, list(START_OF_LONG + "x</arg_value>")) == []
    assert len(feed(reader, ["</tool_call>"])) == 2


def test_ids_are_unique_and_look_like_the_api_s() -> None:
    reader = GlmParser(TOOLS, start_in_reasoning=False, generation=Generation.GLM_5_2)
    starts = [delta for delta in reader.feed(CALL * 200) if isinstance(delta, ToolCallStart)]
    assert len({start.id for start in starts}) == 200
    assert all(start.id.startswith("call_") and len(start.id) > 20 for start in starts)


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_a_long_string_is_sent_while_it_comes(size: int) -> None:
    text = START_OF_LONG + LONG
    reader = parser()
    deltas = feed(reader, [text[at : at + size] for at in range(0, len(text), size)])
    assert deltas[0] == ToolCallStart(0, "call_0", "save_note")
    fragments = "".join(delta.fragment for delta in deltas if isinstance(delta, ToolCallArguments))
    assert json.loads(fragments + '"}')["text"] == LONG
    deltas += feed(reader, ["</arg_value><arg_key>tags</arg_key><arg_value>[1]</arg_value></tool_call>"])
    deltas += reader.finish(EndOfText.STOP)
    [call] = fold(deltas).tool_calls
    assert json.loads(call.arguments) == {"title": "t", "text": LONG, "tags": [1]}


def test_two_long_strings_and_a_key_that_comes_again() -> None:
    reader = parser()
    text = (
        f"<tool_call>save_note<arg_key>text</arg_key><arg_value>{LONG}</arg_value>"
        f"<arg_key>title</arg_key><arg_value>{LONG}</arg_value>"
        f"<arg_key>text</arg_key><arg_value>{LONG}again</arg_value></tool_call>"
    )
    [call] = fold(feed(reader, [text])).tool_calls
    assert json.loads(call.arguments, object_pairs_hook=list) == [("text", LONG), ("title", LONG)]


def test_the_last_of_two_short_values_wins_before_a_long_one() -> None:
    text = (
        f"<tool_call>save_note<arg_key>text</arg_key><arg_value>old</arg_value><arg_key>text</arg_key><arg_value>{LONG}"
    )
    [call] = fold(feed(parser(), [text + "</arg_value></tool_call>"])).tool_calls
    assert json.loads(call.arguments, object_pairs_hook=list) == [("text", LONG)]


@pytest.mark.parametrize("end", list(EndOfText))
@pytest.mark.parametrize("tail", ["", "</arg_val", "</arg_value><arg_key>ta"])
def test_a_long_string_that_never_ends_is_no_call(end: EndOfText, tail: str) -> None:
    reader = parser()
    deltas = feed(reader, ["Saving.", START_OF_LONG + LONG + tail])
    deltas += reader.finish(end)
    assert deltas[-1] == ToolCallArguments(0, "", abandons=True)
    turn = fold(deltas)
    assert (turn.content, turn.tool_calls) == ("Saving.", ())
    sent = "".join(delta.fragment for delta in deltas if isinstance(delta, ToolCallArguments))
    with pytest.raises(ValueError):
        json.loads(sent)  # incomplete, so nobody can run it


@pytest.mark.parametrize("n", [STREAM_FROM - 1, STREAM_FROM, STREAM_FROM + 1])
@pytest.mark.parametrize("end", list(EndOfText))
def test_pieces_do_not_matter_around_the_length_from_which_strings_stream(n: int, end: EndOfText) -> None:
    text = START_OF_LONG + "x" * n
    turns = []
    for pieces in ([text], list(text), [text[:-1], text[-1]]):
        reader = parser()
        turns.append(fold(feed(reader, pieces) + reader.finish(end)))
    assert turns[0] == turns[1] == turns[2]


def test_what_may_be_something_else_than_a_string_is_never_sent_early() -> None:
    reader = parser()
    text = "<tool_call>save_note<arg_key>tags</arg_key><arg_value>[" + '"x", ' * 2000
    assert feed(reader, [text]) == []
    assert len(feed(reader, ['"y"]</arg_value></tool_call>'])) == 2


# ── what was sent as the wrong thing ─────────────────────────────────────────────────────────────────────────────────


def test_an_answer_sent_as_reasoning_is_said_again_as_content() -> None:
    reader = parser(thinks=True)
    deltas = feed(reader, ["The", " answer", ".\n"])
    assert deltas == [ReasoningDelta("The"), ReasoningDelta(" answer"), ReasoningDelta(".\n")]
    end = reader.finish(EndOfText.STOP)
    assert end == [ContentDelta("The answer.", takes_back=len("The answer.\n"))]
    assert fold(deltas + end).reasoning == ""


def test_reasoning_sent_as_content_is_said_again_as_reasoning() -> None:
    reader = parser()
    deltas = feed(reader, ["6 times", " 9\n", "is 54</think>", "54"])
    assert deltas == [
        ContentDelta("6 times"),
        ContentDelta(" 9"),
        ContentDelta("\nis 54"),
        ReasoningDelta("6 times 9\nis 54", takes_back=len("6 times 9\nis 54")),
        ContentDelta("54"),
    ]
    assert fold(deltas).content == "54"


def test_past_a_limit_what_was_sent_stays_what_it_was() -> None:
    reader = parser(thinks=True)
    deltas = feed(reader, ["word " * 1000] * 100)
    assert reader.finish(EndOfText.STOP) == []
    assert len(fold(deltas).reasoning) == 500_000


def test_a_call_in_reasoning_waits_for_the_end() -> None:
    reader = parser(thinks=True)
    assert feed(reader, ["Look.", CALL, " Or not"]) == [ReasoningDelta("Look.")]
    assert feed(reader, ["</think>No."]) == [ReasoningDelta(CALL + " Or not"), ContentDelta("No.")]

    reader = parser(thinks=True)
    feed(reader, ["Look.", CALL])
    assert reader.finish(EndOfText.STOP) == [ToolCallStart(0, "call_0", "tide_table"), ToolCallArguments(0, "{}")]


# ── the end of a turn ────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_counts_after_the_turn_has_ended() -> None:
    reader = parser(thinks=True)
    deltas = feed(reader, ["x</think>Yes.", "<|user|>", "And then?", CALL])
    assert reader.ended
    assert reader.finish(EndOfText.STOP) == []
    assert fold(deltas).content == "Yes."


def test_a_parser_is_not_ended_while_the_turn_goes_on() -> None:
    reader = parser()
    feed(reader, ["Yes.", CALL])
    assert not reader.ended


def test_empty_pieces_mean_nothing() -> None:
    reader = parser()
    assert feed(reader, ["", "a", ""]) == [ContentDelta("a")]


# ── the dialect ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("opens", [True, False])
def test_the_start_comes_from_the_prompt_s_tail(opens: bool) -> None:
    dialect = GlmDialect(Generation.GLM_5_2)
    prompt = Prompt((PromptSpan("[gMASK]<sop>", literal=False),), opens_in_reasoning=opens)
    reader = dialect.parser(prompt, TOOLS)
    assert reader.feed("hm") == [ReasoningDelta("hm") if opens else ContentDelta("hm")]
    assert dialect.name == "glm"
    assert dialect.shows_special_tokens


@pytest.mark.parametrize("generation", list(Generation))
def test_generation_decides_only_about_blanks_around_reasoning(generation: Generation) -> None:
    reader = parser(thinks=True, generation=generation)
    deltas = feed(reader, [f"\n a \n</think>\nb{CALL}"])
    turn = fold(deltas + reader.finish(EndOfText.STOP))
    assert turn.reasoning == ("a" if generation is Generation.GLM_4_5 else "\n a \n")
    assert turn.content == "b"
    assert [call.name for call in turn.tool_calls] == ["tide_table"]
