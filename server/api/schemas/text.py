"""Bodies of the vocabulary routes: /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from server.api.schemas.completion import read_prompts
from server.api.schemas.fields import Body, Int32
from server.service import RawPrompt

_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "minItems": 1},
    ],
    "description": "A text, or a list of texts and token ids that are joined.",
}


def _content(value: Any) -> RawPrompt:
    prompts = read_prompts(value)
    if any(isinstance(item, list) for item in value):
        raise ValueError("must be a text, or a list of texts and token ids; lists cannot be nested")
    return tuple(piece for prompt in prompts for piece in prompt)


class TokenizeRequest(Body):
    content: Annotated[RawPrompt, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
    add_special: bool | None = Field(None, description="Add BOS and EOS as the vocabulary says. Default false.")
    parse_special: bool | None = Field(None, description="Texts of control tokens mean them. Default true.")
    with_pieces: bool | None = Field(None, description="Add the text of each token, or its bytes where no UTF-8.")


class DetokenizeRequest(Body):
    tokens: list[Int32]


class TokenPiece(Body):
    id: int
    piece: str | list[int]


class TokenizeAnswer(Body):
    tokens: list[int] | list[TokenPiece]


class DetokenizeAnswer(Body):
    content: str
