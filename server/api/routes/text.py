"""The vocabulary: text to tokens and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.context import api_of
from server.api.openapi import errors_of_post, gives, takes
from server.api.render.parts import to_json
from server.api.schemas.text import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from server.api.stream import unless_client_leaves
from server.service import check_tokens

router = APIRouter()


@router.post(
    "/tokenize",
    openapi_extra=takes(TokenizeRequest),
    responses=gives("Token ids.", model=TokenizeAnswer, errors=errors_of_post()),
)
async def tokenize(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, TokenizeRequest)

    async def work() -> list[Any]:
        tokens = await api.service.tokenize_raw(
            body.content, add_special=bool(body.add_special), parse_special=body.parse_special is not False
        )
        if not body.with_pieces:
            return tokens
        pieces = await api.engine.pieces(tokens)
        return [{"id": token, "piece": _shown(piece)} for token, piece in zip(tokens, pieces, strict=True)]

    return Response(to_json({"tokens": await unless_client_leaves(request, work())}), media_type="application/json")


@router.post(
    "/detokenize",
    openapi_extra=takes(DetokenizeRequest),
    responses=gives("Text.", model=DetokenizeAnswer, errors=errors_of_post()),
)
async def detokenize(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, DetokenizeRequest)
    check_tokens(body.tokens, api.engine.facts)
    text = await unless_client_leaves(request, api.engine.detokenize(body.tokens))
    return Response(to_json({"content": text}), media_type="application/json")


def _shown(piece: bytes) -> str | list[int]:
    """Text, or the bytes where a token is no whole text."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
