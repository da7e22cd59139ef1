"""docs/api.md names every route, field and kind of error."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import errors
from server.api.errors import _KINDS
from server.api.routes import chat, completions, health, models, state, text
from server.api.schemas.chat import UNSUPPORTED_IN_CHAT, ChatMessage, ChatRequest
from server.api.schemas.completion import CompletionRequest
from server.api.schemas.generation import UNSUPPORTED
from server.api.schemas.text import DetokenizeRequest, TokenizeRequest
from server.engine.sampler_names import LETTER_OF_SAMPLER

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("family", [chat, completions, health, models, state, text])
def test_routes(family: object) -> None:
    for route in family.router.routes:  # type: ignore[attr-defined]
        path = route.path.replace(":path", "")
        if path != "/chat/completions/input_tokens":  # a second name that nobody has to know
            assert f"{path}`" in PAGE, path


@pytest.mark.parametrize("model", [ChatRequest, ChatMessage, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_fields(model: type) -> None:
    for name in model.model_fields:  # type: ignore[attr-defined]
        shown = "stream_options.include_usage" if name == "stream_options" else name
        assert f"`{shown}`" in PAGE, name


@pytest.mark.parametrize("name", sorted({*UNSUPPORTED, *UNSUPPORTED_IN_CHAT, *LETTER_OF_SAMPLER}))
def test_refused_fields_and_samplers(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_errors() -> None:
    reasons = {kind.code for kind, _, _ in _KINDS} | {errors.ModelNotFound.code}
    for reason in reasons:
        assert f"`{reason}`" in PAGE, reason
    for _, status, name in _KINDS:
        assert f"| {status} | `{name}` |" in PAGE
