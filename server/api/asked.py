"""What a request asks for, from its body, its headers and the rights of its key."""

from __future__ import annotations

import dataclasses

from starlette.requests import Request

from server.api import explain
from server.api.context import api_of, notes_of
from server.api.schemas.generation import GenerationFields
from server.service import GenerationOptions


def generation_options(request: Request, body: GenerationFields, n_logprobs: int | None) -> GenerationOptions:
    """The body over the server's defaults, as the owner of the request's key."""
    options = api_of(request).options
    asked = dataclasses.replace(
        body.generation_options(options.generation, n_logprobs),
        explain_cache=options.log_cache_misses or explain.asks(request),
    )
    key = notes_of(request.scope).key
    if key is None:
        return dataclasses.replace(asked, priority=body.priority or 0)
    # Nobody gets ahead of what the key allows.
    priority = key.priority if body.priority is None else max(body.priority, key.priority)
    return dataclasses.replace(asked, owner=key.name, owner_limit=key.max_jobs, priority=priority)
