"""Raw completions: OpenAI's, and llama.cpp's own."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.asked import generation_options
from server.api.body import read_body
from server.api.context import Api, api_of
from server.api.openapi import ERRORS_OF_GENERATION, gives, takes
from server.api.render.completion import CompletionWriter
from server.api.render.native import NativeWriter
from server.api.render.parts import Identity, Shows, Writer
from server.api.schemas.completion import CompletionRequest, NativeRequest
from server.api.stream import answer
from server.generation import Generation
from server.service import RawPrompt

router = APIRouter()


@router.post(
    "/v1/completions",
    openapi_extra=takes(CompletionRequest),
    responses=gives(
        "A text completion, or a stream of chunks.",
        media_types=("application/json", "text/event-stream"),
        errors=ERRORS_OF_GENERATION,
    ),
)
async def create_completion(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, CompletionRequest)
    api.check_model(body.model)
    options = generation_options(request, body, body.n_logprobs)
    shows = _shows(body)
    echoes: list[str] = []

    async def open_generation() -> Generation:
        generation = await api.service.open_completion(body.prompt, options)
        if body.echo:
            echoes.extend(await _prompt_texts(api, body.prompt, generation, options.n))
        return generation

    def writer_of(generation: Generation) -> Writer:
        identity = Identity.new("cmpl", api.model_name, generation.facts.build_info)
        return CompletionWriter(identity, generation, shows, echoes or None)

    return await answer(
        request, open_generation, writer_of, streams=bool(body.stream), ping_interval_s=body.ping_interval_s
    )


@router.post(
    "/completion",
    openapi_extra=takes(NativeRequest),
    responses=gives(
        "llama.cpp's own completion object (a list of them for several choices), or a stream of such objects.",
        schema={"type": ["object", "array"]},
        media_types=("application/json", "text/event-stream"),
        errors=ERRORS_OF_GENERATION,
    ),
)
@router.post("/completions", include_in_schema=False)
async def create_native_completion(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, NativeRequest)
    api.check_model(body.model)
    options = generation_options(request, body, body.n_logprobs)
    shows = _shows(body)
    texts: list[str] = []

    async def open_generation() -> Generation:
        generation = await api.service.open_completion(body.prompt, options)
        texts.extend(await _prompt_texts(api, body.prompt, generation, options.n))
        return generation

    def writer_of(generation: Generation) -> Writer:
        return NativeWriter(api.model_name, generation, shows, texts, streams=bool(body.stream))

    return await answer(
        request, open_generation, writer_of, streams=bool(body.stream), ping_interval_s=body.ping_interval_s
    )


def _shows(body: NativeRequest) -> Shows:
    return Shows(
        usage=body.wants_usage,
        timings_per_token=bool(body.timings_per_token),
        tokens=bool(body.return_tokens),
        probabilities=bool(body.post_sampling_probs),
    )


async def _prompt_texts(api: Api, prompts: Sequence[RawPrompt], generation: Generation, n: int) -> list[str]:
    """The text of each choice's prompt: as it was sent, or read back from its tokens. Failing closes the generation."""
    texts: list[str] = []
    try:
        for prompt, tokens in zip(prompts, generation.prompts, strict=True):
            as_sent = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], str) else None
            text = as_sent if as_sent is not None else await api.engine.detokenize(tokens)
            texts += [text] * n
    except BaseException:
        generation.close()
        raise
    return texts
