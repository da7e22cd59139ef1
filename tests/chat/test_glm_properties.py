"""Turns as GLM writes them, whole and damaged: dropped, doubled and swapped tags, cut anywhere.

Of a whole turn the parser must give back exactly what was put in. Of a damaged one it must make something that a client
can take: valid JSON, no tag in a name or key, the same however the text arrives.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.chat.messages import ParsedTurn, fold
from server.chat.tags import Tag
from tests.chat.run_cases import parse, protocol_fault, same_json

TAGS = [tag.value for tag in Tag]
PARAMETERS: dict[str, dict[str, Any]] = {
    "send": {"parcel": {"type": "string"}, "copies": {"type": "integer"}},
    "send_mail": {"to": {"type": "string"}, "body": {"type": "string"}, "extra": {"type": "object"}},
    "tide_table": {},
    "查询": {"城市": {"type": "string"}, "天数": {"type": ["integer", "null"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in PARAMETERS.items()
]
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "copies": st.integers(),
    "天数": st.none() | st.integers(),
    "extra": st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2),
}
# Values with anything in them but the tags that may end a value, which only their place can tell from data.
ENDERS = ("</arg_value>", "</tool_call>", "<arg_key>")
words = st.text(alphabet="ab <>/|é天\n\"'\\{}=", max_size=12)
value_texts = (
    st.lists(words | st.sampled_from([tag for tag in TAGS if tag not in ENDERS]), max_size=4)
    .map("".join)
    .filter(lambda text: not text.startswith("<arg_value>"))  # is read as an opener written twice
)
plain = st.text(alphabet="abc .é天\"'", min_size=1, max_size=20).map(str.strip).filter(bool)


@dataclass(frozen=True)
class Turn:
    reasoning: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    newlines: bool

    def text(self) -> str:
        break_ = "\n" if self.newlines else ""
        parts = [self.reasoning, "</think>", break_, self.content]
        for name, arguments in self.calls:
            parts += [break_, "<tool_call>", name, break_]
            for key, value in arguments.items():
                raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                parts += ["<arg_key>", key, "</arg_key>", break_, "<arg_value>", raw, "</arg_value>", break_]
            parts.append("</tool_call>")
        return "".join(parts)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(PARAMETERS)))
    declared = sorted(PARAMETERS[name])
    keys = draw(st.lists(st.sampled_from(declared), unique=True)) if declared else []
    return name, {key: draw(KINDS.get(key, value_texts)) for key in keys}


turns = st.builds(
    Turn,
    reasoning=plain,
    content=st.just("") | plain,
    calls=st.lists(calls(), max_size=3).map(tuple),
    newlines=st.booleans(),
)


def read(
    text: str, pieces: list[str], *, thinks: bool = True, stop: str = "eos", generation: str = "5.2"
) -> ParsedTurn:
    case = {"raw": text, "tools": TOOLS, "starts_in_think": thinks, "generation": generation, "stop": stop}
    deltas = parse(case, pieces)
    assert protocol_fault(deltas) is None
    return fold(deltas)


@given(turns)
@settings(max_examples=300)
def test_a_whole_turn_comes_back_as_it_was_meant(turn: Turn) -> None:
    text = turn.text()
    for pieces in ([text], list(text)):
        found = read(text, pieces)
        assert found.reasoning == turn.reasoning
        assert found.content == turn.content
        got = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
        assert same_json(got, turn.calls)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    parts = [part for part in re.split(r"(<[^<>]*>)", draw(turns).text()) if part]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(parts) - 1)) if parts else 0
        match draw(st.sampled_from(["drop", "double", "replace", "swap", "cut"])):
            case "drop":
                del parts[at : at + 1]
            case "double":
                parts[at:at] = parts[at : at + 1]
            case "replace":
                parts[at : at + 1] = [draw(st.sampled_from(TAGS))]
            case "swap":
                other = draw(st.integers(0, len(parts) - 1)) if parts else 0
                parts[at : at + 1], parts[other : other + 1] = parts[other : other + 1], parts[at : at + 1]
            case _:
                text = "".join(parts)
                parts = [text[: draw(st.integers(0, len(text)))]]
    return "".join(parts)


scraps = [*TAGS, "send", "to", " ", "\n", "\\n", "\\", "x", "7", "a=1", "{", "<", "\ufffd"]
noise = st.lists(st.sampled_from(scraps), max_size=25).map("".join)


@given(damaged() | noise, st.data())
@settings(max_examples=500)
def test_damage_does_no_harm(text: str, data: st.DataObject) -> None:
    thinks, at = data.draw(st.booleans()), data.draw(st.integers(0, len(text)))
    stop, generation = data.draw(st.sampled_from(["eos", "length"])), data.draw(st.sampled_from(["4.5", "5.2"]))
    whole = read(text, [text], thinks=thinks, stop=stop, generation=generation)
    for pieces in (list(text), [text[:at], text[at:]]):
        assert read(text, pieces, thinks=thinks, stop=stop, generation=generation) == whole
    for call in whole.tool_calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        assert not any(tag in name for tag in TAGS for name in (call.name, *arguments))


@given(turns, st.data())
@settings(max_examples=200)
def test_a_cut_turn_has_only_complete_calls_and_no_markup(turn: Turn, data: st.DataObject) -> None:
    text = turn.text()
    cut = text[: data.draw(st.integers(0, len(text)))]
    found = read(cut, [cut], stop="length")
    got = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
    assert got == list(turn.calls)[: len(got)]
    # What is left of a tag at a cut is dropped, but its first sign is likelier to be text.
    assert turn.reasoning.startswith(found.reasoning.rstrip("</"))
    assert turn.content.startswith(found.content.rstrip("</").rstrip())
