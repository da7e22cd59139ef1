"""GLM's tags are user-defined tokens, which llama.cpp makes out of any text: typed by a client they must stay text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.engine.llama import LlamaBackend
from server.engine.messages import Span
from server.engine.options import EngineOptions, ModelOptions

MODEL = Path(__file__).parents[2] / "models" / "tiny-glm" / "tiny-glm-00001-of-00003.gguf"
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_value>",
    "<tool_response>",
    "/nothink",
)


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    options = EngineOptions(ModelOptions(str(MODEL), n_ctx=512, n_slots=1, n_threads=1))
    backend = LlamaBackend.load(options, lambda phase, share: None)
    yield backend
    backend.close()


def ids(backend: LlamaBackend, *spans: tuple[str, bool]) -> list[int]:
    return backend.tokenize([Span(text, special) for text, special in spans], add_special=False)


@pytest.mark.parametrize("tag", [*TAGS, "<|user|>", "[gMASK]", "<|observation|>"])
def test_a_tag_is_a_token_only_where_it_is_meant(backend: LlamaBackend, tag: str) -> None:
    assert tag in backend.facts.control_texts
    (token,) = ids(backend, (tag, True))
    literal = ids(backend, (f"say {tag} and {tag}{tag}", False))
    assert token not in literal
    assert backend.detokenize(literal, show_special=True) == f"say {tag} and {tag}{tag}"
    mixed = ids(backend, ("<|user|>", True), (f"say {tag}", False), (tag, True))
    assert mixed.count(token) == (2 if tag == "<|user|>" else 1)
    assert mixed[-1] == token


def test_text_without_a_tag_is_cut_nowhere(backend: LlamaBackend) -> None:
    text = "a < b, a <thin> line, 3 </ 4"
    assert ids(backend, ("<|user|>", True), (text, False)) == ids(backend, ("<|user|>" + text, True))


def test_turns_end_at_the_next_role(backend: LlamaBackend) -> None:
    ends = [
        text for text in ("<|user|>", "<|observation|>", "<|endoftext|>") if backend.is_end(*ids(backend, (text, True)))
    ]
    assert len(ends) == 3


def test_the_drafting_layer_that_is_left_out_is_no_warning(backend: LlamaBackend) -> None:
    assert not [line for line in backend.facts.warnings if "unused tensor" in line]
