"""Which model is served, and what it is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.context import Api, api_of
from server.api.openapi import errors_of_get, gives
from server.api.render.parts import to_json
from server.errors import ModelNotFound

router = APIRouter()

_MODEL_PARAMETER = {
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
}


@router.get("/v1/models", responses=gives("The served model.", errors=errors_of_get()))
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    facts = api.engine.facts
    entry = {
        "name": api.model_name,
        "model": api.model_name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": facts.description,
        "tags": list(api.options.model_tags),
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": facts.architecture,
            "families": [facts.architecture],
            "parameter_size": str(facts.n_params),
            "quantization_level": facts.ftype,
        },
    }
    body = {"object": "list", "data": [_model(api)], "models": [entry]}
    return Response(to_json(body), media_type="application/json")


@router.get(
    "/v1/models/{model:path}",
    openapi_extra=_MODEL_PARAMETER,
    responses=gives("The served model, under any of its names.", errors=errors_of_get(404)),
)
async def get_model(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    asked = request.path_params["model"]
    if asked not in api.options.model_names:
        raise ModelNotFound(asked, api.options.model_names)
    return Response(to_json(_model(api)), media_type="application/json")


def _model(api: Api) -> dict[str, Any]:
    facts = api.engine.facts
    return {
        "id": api.model_name,
        "aliases": list(api.options.model_names),
        "tags": list(api.options.model_tags),
        "object": "model",
        "created": api.started_at,
        "owned_by": "llamacpp",
        "max_model_len": facts.n_ctx_seq,  # where vLLM's clients look for the context of one request
        "meta": {
            "vocab_type": facts.vocab_type,
            "n_vocab": facts.n_vocab,
            "n_ctx": facts.n_ctx_seq,
            "n_ctx_train": facts.n_ctx_train,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": facts.size_bytes,
            "ftype": facts.ftype,
        },
    }
