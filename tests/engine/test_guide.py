"""Where a constraint holds: from the start, behind a block, from a trigger on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest

from server.engine.constraint import ConstraintCompiler
from server.engine.guide import MASKS_AHEAD, Guide
from server.engine.messages import Constraint, FreeBlock
from server.errors import InvalidRequest
from tests.support.token_tables import glm_table

TABLE = glm_table([b"yes", b"no", b" \n"])
COMPILER = ConstraintCompiler(lambda: TABLE)


def token(text: str) -> int:
    return TABLE.pieces.index(text.encode())


OPEN, CLOSE, CALL, END = token("<think>"), token("</think>"), token("<tool_call>"), token("<|user|>")
ANSWER = Constraint('start: "yes" | "no!"')
CALLS = Constraint('start: "f" </tool_call>', trigger=CALL)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def take(guide: Guide, *texts: str) -> None:
    for text in texts:
        assert not guide.refuses(token(text)), f"refuses {text!r}"
        guide.note(token(text))


def allowed(guide: Guide) -> set[str]:
    """All that may come, asked as a sampler would, by way of a token that may not."""
    assert guide.refuses(token("\x00"))
    return {TABLE.pieces[int(i)].decode() for i in np.flatnonzero(guide.allowed())}


ENDS = {"<|user|>", "<|observation|>", "<|endoftext|>"}


def test_from_the_start_to_the_end(executor: Executor) -> None:
    guide = Guide(COMPILER, ANSWER, None, executor)
    assert allowed(guide) == {"yes", "y", "no", "n"}
    assert guide.refuses(END)
    take(guide, "no")
    assert allowed(guide) == {"!"}
    take(guide, "!")
    assert allowed(guide) == ENDS
    take(guide, "<|observation|>")


def test_an_end_is_allowed_where_more_could_come(executor: Executor) -> None:
    guide = Guide(COMPILER, Constraint("start: /a+/"), None, executor)
    take(guide, "a")
    assert allowed(guide) == {"a"} | ENDS


def test_behind_the_block_that_the_prompt_opened(executor: Executor) -> None:
    guide = Guide(COMPILER, ANSWER, FreeBlock(OPEN, CLOSE, is_open=True), executor)
    take(guide, "x", "<tool_call>", "yes", " ")
    assert guide.substitute(END) == CLOSE, "an answer must not end in its reasoning"
    take(guide, "</think>")
    assert guide.substitute(END) == END
    assert allowed(guide) == {"yes", "y", "no", "n"}


def test_what_ends_an_answer_for_its_reader_does_not_end_it_in_the_block(executor: Executor) -> None:
    block = FreeBlock(OPEN, CLOSE, (token("<arg_key>"),), is_open=True)
    guide = Guide(COMPILER, ANSWER, block, executor)
    assert guide.substitute(token("<arg_key>")) == CLOSE
    assert Guide(COMPILER, CALLS, block, executor).substitute(token("<arg_key>")) == token("<arg_key>")


def test_behind_a_block_that_the_answer_opens(executor: Executor) -> None:
    guide = Guide(COMPILER, ANSWER, FreeBlock(OPEN, CLOSE, may_open=True), executor)
    assert allowed(guide) == {"yes", "y", "no", "n", "<think>", " ", "\t", "\n", "\r", " \n"}
    take(guide, "\n")
    take(guide, "<think>", "\x00", "<think>", "</think>")
    assert allowed(guide) == {"yes", "y", "no", "n"}


def test_a_block_need_not_be_opened(executor: Executor) -> None:
    guide = Guide(COMPILER, ANSWER, FreeBlock(OPEN, CLOSE, may_open=True), executor)
    take(guide, "\n", "\n")
    assert allowed(guide) == {"yes", "y", "no", "n", "<think>"}, "two blanks are enough"
    take(guide, "y")
    assert allowed(guide) == {"e"}


def test_blanks_that_belong_to_the_answer(executor: Executor) -> None:
    guide = Guide(COMPILER, Constraint("start: /\\n+a/"), FreeBlock(OPEN, CLOSE, may_open=True), executor)
    take(guide, "\n", "\n", "\n", "a")
    assert allowed(guide) == ENDS


def test_from_every_trigger_on(executor: Executor) -> None:
    guide = Guide(COMPILER, CALLS, FreeBlock(OPEN, CLOSE), executor)
    for _ in range(2):
        take(guide, "x", "</tool_call>", "yes", "<tool_call>")
        assert allowed(guide) == {"f"}
        take(guide, "f")
        assert guide.refuses(END)
        assert allowed(guide) == {"</tool_call>"}
        take(guide, "</tool_call>", "<|user|>")


def test_a_trigger_inside_a_block_means_nothing(executor: Executor) -> None:
    guide = Guide(COMPILER, CALLS, FreeBlock(OPEN, CLOSE, is_open=True), executor)
    take(guide, "<tool_call>", "x", "</think>", "y", "<think>", "<tool_call>", "z", "<|user|>")
    assert guide.substitute(END) == END, "a free answer may end anywhere"
    take(guide, "</think>", "<tool_call>")
    assert allowed(guide) == {"f"}


class CountingExecutor(ThreadPoolExecutor):
    def __init__(self) -> None:
        super().__init__(1)
        self.n_submitted = 0

    def submit(self, *arguments, **fields) -> Future:  # type: ignore[no-untyped-def, type-arg]
        self.n_submitted += 1
        return super().submit(*arguments, **fields)


def test_masks_are_computed_ahead_only_behind_a_refusal() -> None:
    with CountingExecutor() as executor:
        guide = Guide(COMPILER, Constraint("start: /[a-z]+/"), None, executor)
        take(guide, "y", "e", "s")
        assert executor.n_submitted == 0
        assert guide.refuses(token("!"))
        assert guide.allowed()[token("yes")]
        take_anyway(guide, "yes")
        assert executor.n_submitted == 1
        assert guide.refuses(token("!"))
        assert guide.allowed()[token("no")]
        take_anyway(guide, "no")
        assert executor.n_submitted == 2
        take(guide, *"abcdef")
        assert executor.n_submitted == 1 + MASKS_AHEAD
        guide.close()


def take_anyway(guide: Guide, text: str) -> None:
    """Take a token that was chosen from those allowed, without asking again."""
    guide.note(token(text))


def test_forbidden_texts(executor: Executor) -> None:
    guide = Guide(COMPILER, Constraint("start: /(?s:.*)/ </tool_call>", forbidden=("<no>",)), None, executor)
    take(guide, "<", "no")
    assert guide.refuses(token(">"))
    assert guide.forbids(token(">"))
    assert not guide.refuses(token("</tool_call>"))
    take(guide, "!", ">", "</tool_call>")


def test_a_token_that_may_not_come_is_an_error(executor: Executor) -> None:
    guide = Guide(COMPILER, ANSWER, None, executor)
    with pytest.raises(InvalidRequest, match="cannot be followed any further"):
        guide.note(token("x"))


def test_guides_of_one_constraint_are_apart(executor: Executor) -> None:
    first, second = (Guide(COMPILER, ANSWER, None, executor) for _ in range(2))
    take(first, "y")
    take(second, "n")
    assert allowed(first) == {"e"}
    assert allowed(second) == {"o"}
