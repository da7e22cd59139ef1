"""What parsing costs: work in proportion to the text, memory that does not grow with a long value.

Speed in megabytes a second is only reported (run with -s); whether growth is linear is what is tested.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType

import pytest

from server.chat.glm import GlmParser
from server.chat.glm_generation import Generation
from server.chat.messages import EndOfText, Tool

TOOLS = [
    Tool(
        "send",
        {"properties": {"parcel": {"type": "string"}, "copies": {"type": "integer"}}, "required": ["parcel"]},
        {},
    ),
    Tool("save", {"properties": {"text": {"type": "string"}, "data": {"type": "object"}}}, {}),
    Tool("tide_table", {}, {}),
]
VALUE = "<tool_call>send<arg_key>parcel</arg_key><arg_value>"
PROSE = "The parser answers with several words, some code like x < 3 and vector<int> & a new line.\n"

# Beginnings, and what is repeated behind them: ordinary text, and what would trip a parser that looks back.
TEXTS = {
    "reasoning": ("", PROSE),
    "content": ("x</think>", PROSE),
    "calls": ("x</think>", VALUE + "Oslo is far</arg_value></tool_call>"),
    "string value": ("x</think>" + VALUE, PROSE),
    "object value": ('x</think><tool_call>save<arg_key>data</arg_key><arg_value>{"a": "', "word " * 10),
    "less-than signs": ("x</think>", "<"),
    "half tags": ("", "</thin"),
    "blanks": ("x</think>a", " \n"),
    "blank reasoning": ("", "\n "),
    "openers": ("x</think>", "<tool_call>"),
    "openers in reasoning": ("", "<tool_call>"),
    "drafts": ("", "<tool_call>tide_table</tool_call></think><think>"),
    "open drafts": ("", VALUE + "x</think><think>"),
    "mentions": ("", "Use <tool_call> to call. "),
    "blanks after a value": ("x</think>" + VALUE + "a</arg_value>", "\n"),
    "call closers in a value": ("x</think>" + VALUE, "</tool_call> t "),
    "value closers in a value": ("x</think>" + VALUE, "</arg_value> "),
    "keys in a value": ("x</think>" + VALUE, "<arg_key>copies</arg_key>"),
    "values never closed": ("x</think>", VALUE + "x</tool_call> t "),
    "names": ("x</think>", "send "),
    "names and keys": ("x</think>", "send<arg_key>"),
    "pairs": ("x</think><tool_call>send", "<arg_key>k</arg_key><arg_value>v</arg_value>"),
    "pairs with equals": ("x</think><tool_call>send ", "parcel={ "),
    "open JSON": ("x</think><tool_call>", '[{"a": '),
    "blank head": ("x</think><tool_call>", " "),
    "opened again": ("x</think><tool_call>tide_table<tool_call>", "word "),
}


def read(text: str, size: int = 8) -> None:
    parser = GlmParser(TOOLS, start_in_reasoning=True, generation=Generation.GLM_5_2)
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.finish(EndOfText.STOP)


def text_of(name: str, n_characters: int) -> str:
    start, repeated = TEXTS[name]
    return start + repeated * (n_characters // len(repeated))


def count_calls(work: Callable[[], None]) -> int:
    """Function calls, Python's and C's: the same on every machine."""
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return n


def least_time(text: str) -> float:
    times = []
    for _ in range(4):
        start = time.process_time()
        read(text)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("name", TEXTS)
def test_steps_grow_with_the_text_and_no_faster(name: str) -> None:
    small, large = (count_calls(lambda n=n: read(text_of(name, n))) for n in (4_000, 32_000))  # type: ignore[misc]
    assert large < 12 * small + 40_000, f"{small} calls for 4,000 characters, {large} for 32,000"


@pytest.mark.parametrize("name", TEXTS)
def test_time_grows_with_the_text_and_no_faster(name: str) -> None:
    """Eight times the text: 8 times the time if linear, 64 times if quadratic. Copying shows only here."""
    small, large = least_time(text_of(name, 10_000)), least_time(text_of(name, 80_000))
    assert large < 24 * max(small, 0.002), f"{small * 1000:.1f} ms for 10,000 characters, {large * 1000:.1f} for 80,000"


@pytest.mark.parametrize("name", ["string value", "content"])
def test_memory_is_flat_for_a_megabyte(name: str) -> None:
    text = text_of(name, 1_000_000)
    pieces = [text[at : at + 8] for at in range(0, len(text), 8)]
    parser = GlmParser(TOOLS, start_in_reasoning=True, generation=Generation.GLM_5_2)
    tracemalloc.start()
    try:
        for piece in pieces:
            parser.feed(piece)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024


def test_memory_for_reasoning_that_may_be_the_answer_is_bounded() -> None:
    parser = GlmParser(TOOLS, start_in_reasoning=True, generation=Generation.GLM_5_2)
    tracemalloc.start()
    try:
        for _ in range(200_000):
            parser.feed("some words ")
        current_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * 1024 * 1024
    assert current_bytes < 64 * 1024


def test_report_speed() -> None:
    """Not a limit, which would depend on the machine: all that is asked is that there is a number to read."""
    generator = random.Random(1)
    for name in ("reasoning", "content", "string value", "object value", "calls"):
        text = text_of(name, 400_000)
        cuts = [0]
        while cuts[-1] < len(text):
            cuts.append(cuts[-1] + generator.randint(4, 12))
        pieces = [text[at:end] for at, end in itertools.pairwise(cuts)]
        parser = GlmParser(TOOLS, start_in_reasoning=True, generation=Generation.GLM_5_2)
        start = time.process_time()
        n_deltas = sum(len(parser.feed(piece)) for piece in pieces)
        seconds = time.process_time() - start
        print(f"{name}: {len(text) / seconds / 1e6:.1f} MB/s in pieces of 4 to 12 characters")
        assert n_deltas > 0 or name == "object value"
