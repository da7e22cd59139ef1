"""Runs a file of parser cases: each text whole, cut at every place, character by character, and byte by byte.

    python -m tests.chat.run_cases FILE.json

A case has `id`, `generation`, `starts_in_think`, `tools` (OpenAI tool objects), `raw`, `stop` ("eos" or "length"),
optionally `tool_choice`, and `expect` with `reasoning`, `content`, `tool_calls` (name and arguments) and
`finish_reason`. Null and the empty string are equal. Compared is the fold of the deltas, which is what a non-streaming
answer shows; that the deltas themselves keep to the protocol is checked on the way.
"""

from __future__ import annotations

import codecs
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from server.chat.glm import GlmParser
from server.chat.glm_generation import Generation
from server.chat.messages import Delta, EndOfText, ParsedTurn, Tool, ToolCallArguments, ToolCallStart, fold

_GENERATIONS = {"4.6": "4.5", "5.1": "5"}


def read_cases(path: Path) -> list[dict[str, Any]]:
    cases = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(cases, list)
    return cases


def read_tools(wires: Iterable[dict[str, Any]]) -> tuple[Tool, ...]:
    return tuple(Tool(wire["function"]["name"], wire["function"].get("parameters") or {}, wire) for wire in wires)


def parse(case: dict[str, Any], pieces: Iterable[str]) -> list[Delta]:
    """All deltas of one way to cut the case's text."""
    tools = read_tools(case.get("tools") or ()) if case.get("tool_choice") != "none" else ()
    generation = case["generation"]
    ids = itertools.count()
    parser = GlmParser(
        tools,
        start_in_reasoning=case["starts_in_think"],
        generation=Generation(_GENERATIONS.get(generation, generation)),
        new_id=lambda: f"call_{next(ids)}",
    )
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish(end_of(case))


def end_of(case: dict[str, Any]) -> EndOfText:
    return EndOfText.LENGTH if case.get("stop") == "length" else EndOfText.STOP


def cuttings(text: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Ways to cut a text, each with a name."""
    yield "whole", [text]
    for at in range(1, len(text)):
        yield f"cut at {at}", [text[:at], text[at:]]
    yield "character by character", list(text)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    data = text.encode()
    pieces = [decoder.decode(data[at : at + 1]) for at in range(len(data))]
    yield "byte by byte", [*pieces, decoder.decode(b"", final=True)]
    for size in (2, 3, 7):
        yield f"pieces of {size}", [text[at : at + size] for at in range(0, len(text), size)]


def protocol_fault(deltas: Sequence[Delta]) -> str | None:
    """What is wrong with the order of the deltas as the OpenAI wire needs them, if anything."""
    n_calls = 0
    ids: set[str] = set()
    for delta in deltas:
        match delta:
            case ToolCallStart(index, call_id, name):
                if index != n_calls or call_id in ids or not name:
                    return f"bad start of a call: {delta}"
                n_calls += 1
                ids.add(call_id)
            case ToolCallArguments(index):
                if index != n_calls - 1:
                    return f"arguments of a call that is not the last begun: {delta}"
    return None


def fault(case: dict[str, Any], deltas: Sequence[Delta]) -> str | None:
    """How the fold of these deltas differs from what the case expects, if it does."""
    turn = fold(deltas)
    expect = case["expect"]
    if wrong := protocol_fault(deltas):
        return wrong
    if turn.reasoning != (expect["reasoning"] or ""):
        return f"reasoning {turn.reasoning!r}"
    if turn.content != (expect["content"] or ""):
        return f"content {turn.content!r}"
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in turn.tool_calls]
    except ValueError:
        return f"arguments that are not JSON: {turn.tool_calls}"
    wanted = [(call["name"], call["arguments"]) for call in expect["tool_calls"]]
    if not same_json(calls, wanted):
        return f"calls {calls!r}"
    reason = finish_reason(turn, end_of(case))
    if "finish_reason" in expect and reason != expect["finish_reason"]:
        return f"finish_reason {reason}"
    return None


def same_json(one: object, other: object) -> bool:
    """Equal as JSON values: true is not 1, but 3 is 3.0."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def finish_reason(turn: ParsedTurn, end: EndOfText) -> str:
    if end is EndOfText.LENGTH:
        return "length"
    return "tool_calls" if turn.tool_calls else "stop"


def first_fault(case: dict[str, Any]) -> str | None:
    for name, pieces in cuttings(case["raw"]):
        if wrong := fault(case, parse(case, pieces)):
            return f"{name}: {wrong}"
    return None


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tests.chat.run_cases FILE.json", file=sys.stderr)
        return 2
    cases = read_cases(Path(arguments[0]))
    failed = [(case["id"], wrong) for case in cases if (wrong := first_fault(case))]
    for case_id, wrong in failed:
        print(f"FAILED {case_id}: {wrong}")
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
