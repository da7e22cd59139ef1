"""Why a prompt was not in the cache, for those who ask: a response header for the client, a log line for the operator.

The header has nothing but the client's own text: how the cached prompt goes on may be another client's business. The
log line has both, and is written only with --log-cache-misses, because it is prompt text.
"""

from __future__ import annotations

import json
import logging

from starlette.requests import Request

from server.api.context import Notes
from server.engine.messages import Started
from server.generation import Generation

logger = logging.getLogger(__name__)

HEADER = "X-Cache-Explain"
LEAST_LOST = 64  # prompt tokens behind the difference that make it worth a log line
_NO = ("", "0", "false", "off", "no")


def asks(request: Request) -> bool:
    return request.headers.get(HEADER, "").strip().lower() not in _NO


def header_value(generation: Generation) -> str:
    """JSON in ASCII about the first prompt of a request. Only once it has started is there anything to say."""
    start = _start(generation)
    if start is None:
        return '{"started": false}'
    found = start.divergence
    shown: dict[str, object] = {
        "prompt_tokens": start.n_prompt,
        "cached_tokens": start.n_cached,
        "diverged_at": None if found is None else found.at,
    }
    if found is not None:
        shown |= {"before": found.before, "here": found.prompt, "alike_again_after": found.rejoins_after}
    return json.dumps(shown)


def log_miss(notes: Notes) -> None:
    """One line, if the prompt differs from what is cached and that cost something."""
    start = _start(notes.generation) if notes.generation is not None else None
    if start is None or start.divergence is None:
        return
    found = start.divergence
    n_lost = start.n_prompt - found.at
    if n_lost < LEAST_LOST:
        return
    again = ""
    if found.rejoins_after is not None:
        again = (
            f"; {found.rejoins_after} tokens later both are alike again, so something stands there that changes with "
            f"each request"
        )
    logger.info(
        "cache: the prompt of request %s%s is like the nearest cached one for %d of %d tokens, then comes %r after %r, "
        "where the cached one has %r%s",
        notes.request_id,
        f" ({notes.key.name})" if notes.key is not None else "",
        found.at,
        start.n_prompt,
        found.prompt,
        found.before,
        found.cached,
        again,
    )


def _start(generation: Generation) -> Started | None:
    return generation.choices[0].stream.start
