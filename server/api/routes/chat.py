"""OpenAI's chat completions, and what a chat's prompt would be."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.asked import generation_options
from server.api.body import read_body
from server.api.context import api_of
from server.api.openapi import ERRORS_OF_GENERATION, errors_of_post, gives, takes
from server.api.render.chat import ChatWriter
from server.api.render.parts import Identity, Shows, Writer, to_json
from server.api.schemas.chat import ChatRequest, PromptAnswer, PromptRequest, TokenCount
from server.api.stream import answer, unless_client_leaves
from server.generation import Generation

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatRequest),
    responses=gives(
        "A chat completion, or a stream of chunks.",
        media_types=("application/json", "text/event-stream"),
        errors=ERRORS_OF_GENERATION,
    ),
)
@router.post("/chat/completions", include_in_schema=False)
async def create_chat_completion(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, ChatRequest)
    api.check_model(body.model)
    conversation = body.conversation()
    options = generation_options(request, body, body.n_logprobs)
    shows = Shows(
        usage=body.wants_usage,
        timings_per_token=bool(body.timings_per_token),
        tokens=bool(body.return_tokens),
        probabilities=options.post_sampling_probs,
    )

    def writer_of(generation: Generation) -> Writer:
        return ChatWriter(Identity.new("chatcmpl", api.model_name, generation.facts.build_info), generation, shows)

    return await answer(
        request,
        lambda: api.service.open_chat(conversation, options),
        writer_of,
        streams=bool(body.stream),
        ping_interval_s=body.ping_interval_s,
    )


@router.post(
    "/apply-template",
    openapi_extra=takes(PromptRequest),
    responses=gives("The prompt of a chat.", model=PromptAnswer, errors=errors_of_post(404, 501)),
)
async def apply_template(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, PromptRequest)
    api.check_model(body.model)
    prompt = api.service.render(body.conversation())
    return Response(to_json({"prompt": prompt.text}), media_type="application/json")


@router.post(
    "/v1/chat/completions/input_tokens",
    openapi_extra=takes(PromptRequest),
    responses=gives("How many tokens the prompt of a chat has.", model=TokenCount, errors=errors_of_post(404, 501)),
)
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def count_input_tokens(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    body = await read_body(request, PromptRequest)
    api.check_model(body.model)
    count = await unless_client_leaves(request, api.service.count(body.conversation()))
    return Response(to_json({"object": "response.input_tokens", "input_tokens": count}), media_type="application/json")
