"""Bodies of the raw completion routes: OpenAI's /v1/completions and llama.cpp's /completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from server.api.schemas.fields import INT32_MAX, Int32, refuse, refuse_unsupported, shown
from server.api.schemas.generation import MAX_LOGPROBS, GenerationFields
from server.service import RawPrompt

_PIECE = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [*_PIECE["anyOf"], {"type": "array", "items": _PIECE, "minItems": 1}]},
        },
    ],
    "description": "A text, a list of token ids and texts that are joined, or a list of such prompts.",
}


def read_prompts(value: Any) -> tuple[RawPrompt, ...]:
    """A text, or a list with at least one token id, is one prompt; a list of only texts or with lists is several."""
    if isinstance(value, str):
        return ((value,),)
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a text, a list of token ids, or a list of those, but got {shown(value)}")
    joined = any(_is_token(item) for item in value) and all(_is_piece(item) for item in value)
    return (_joined(value),) if joined else tuple(_one(item) for item in value)


def _one(item: Any) -> RawPrompt:
    if isinstance(item, str):
        return (item,)
    if isinstance(item, list) and item:
        return _joined(item)
    raise ValueError(f"must be made of texts, token ids or lists of those, but got {shown(item)}")


def _joined(items: list[Any]) -> RawPrompt:
    pieces: list[str | tuple[int, ...]] = []
    run: list[int] = []
    for item in items:
        if _is_token(item):
            run.append(int(item))
        elif isinstance(item, str):
            pieces += [tuple(run), item] if run else [item]
            run = []
        else:
            raise ValueError(f"must be made of texts and token ids, but got {shown(item)}")
    return (*pieces, tuple(run)) if run else tuple(pieces)


def _is_token(item: Any) -> bool:
    whole = isinstance(item, int) or (isinstance(item, float) and item.is_integer())
    return whole and not isinstance(item, bool) and abs(item) <= INT32_MAX


def _is_piece(item: Any) -> bool:
    return isinstance(item, str) or _is_token(item)


_CHATS_ONLY = dict.fromkeys(
    ("reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget_message"),
    "is for chats; a raw prompt says itself where reasoning begins",
)
_NO_BUDGET = {"reasoning_budget_tokens": (-1,), "thinking_budget_tokens": (-1,)}


class NativeRequest(GenerationFields):
    """POST /completion."""

    prompt: Annotated[tuple[RawPrompt, ...], BeforeValidator(read_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[Int32, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_for_chats(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            refuse_unsupported(raw, _CHATS_ONLY, _NO_BUDGET)
        return raw

    @property
    def n_logprobs(self) -> int | None:
        return self.n_probs or self.logprobs


class CompletionRequest(NativeRequest):
    """POST /v1/completions."""

    echo: bool | None = Field(None, description="Put the prompt before the text.")

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.n_logprobs is not None:
            raise refuse("echo", "is not supported together with 'logprobs'")
        return self
