"""The server's own state: properties, slots, metrics. None of these waits for the engine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import read_body
from server.api.context import Api, api_of
from server.api.openapi import errors_of_get, errors_of_post, gives, takes
from server.api.render.native import settings
from server.api.render.parts import to_json
from server.api.schemas.slot import SlotFile
from server.api.stream import unless_client_leaves
from server.engine.messages import Job, SlotAction, SlotState, SlotView
from server.errors import InvalidRequest, NotSupported, Unavailable
from server.ops.metrics import CONTENT_TYPE
from server.service import GenerationOptions

router = APIRouter()

_FAIL_ON_NO_SLOT = {
    "parameters": [
        {
            "name": "fail_on_no_slot",
            "in": "query",
            "required": False,
            "schema": {"type": "string"},
            "description": "With any value: 503 when every slot is taken.",
        }
    ]
}


@router.get("/props", responses=gives("How the server is set up.", errors=errors_of_get()))
async def get_props(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    facts = api.engine.facts
    defaults = api.options.generation
    options = GenerationOptions(sampling=defaults.sampling, max_tokens=defaults.max_tokens)
    job = Job(0, [], options.sampling, options.max_tokens)
    props = {
        "default_generation_settings": {"params": settings(job, streams=True), "n_ctx": facts.n_ctx_seq},
        "total_slots": facts.n_slots,
        "model_alias": api.model_name,
        "model_names": api.options.model_names,
        "model_path": api.model_path,
        "model_ftype": facts.ftype,
        "modalities": {"vision": False, "audio": False, "video": False},
        "endpoint_slots": api.options.slots,
        "endpoint_props": api.options.props,
        "endpoint_metrics": api.options.metrics,
        "chat_template": api.service.template_source,
        "bos_token": facts.bos_text,
        "eos_token": facts.eos_text,
        "build_info": facts.build_info,
        "is_sleeping": False,
        "n_ctx": facts.n_ctx,
        "kv_unified": facts.kv_unified,
        "split_mode": facts.split_mode,
        "n_gpu_layers": facts.n_gpu_layers,
        "devices": [device.name for device in facts.devices],
        "tensor_split": facts.tensor_split,
        "pipelined": facts.pipelined,
        "n_cpu_moe": facts.n_cpu_moe,
        "load_mode": facts.load_mode,
        "memory": facts.memory,
        "warnings": facts.warnings,
    }
    return Response(to_json(props), media_type="application/json")


@router.post("/props", responses=gives("Nothing can be changed.", errors=errors_of_post(501)))
async def post_props(request: Request) -> Response:
    api = api_of(request)
    api.check_ready()
    if not api.options.props:
        raise NotSupported("changing properties is off; start the server with --props")
    return Response(to_json({"success": True}), media_type="application/json")


@router.get(
    "/slots",
    openapi_extra=_FAIL_ON_NO_SLOT,
    responses=gives("The slots, one object each.", schema={"type": "array"}, errors=errors_of_get(501)),
)
async def get_slots(request: Request) -> Response:
    api = api_of(request)
    if not api.options.slots:
        raise NotSupported("the slots endpoint is off; start the server with --slots")
    api.check_ready()
    snapshot = api.engine.snapshot
    views = snapshot.slots if snapshot is not None else []
    if request.query_params.get("fail_on_no_slot") and not any(view.state is SlotState.IDLE for view in views):
        raise Unavailable("no slot available", retry_after_s=1)
    return Response(to_json([_slot(view, api) for view in views]), media_type="application/json")


@router.post(
    "/slots/{id_slot}",
    openapi_extra=takes(SlotFile, required=False)
    | {
        "parameters": [
            {"name": "id_slot", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}},
            {
                "name": "action",
                "in": "query",
                "required": True,
                "schema": {"type": "string", "enum": [action.value for action in SlotAction]},
            },
        ]
    },
    responses=gives("What was done.", errors=errors_of_post(409, 500, 501)),
)
async def act_on_slot(request: Request) -> Response:
    """llama.cpp's actions on a slot that is idle. The answer comes when the file is written or read."""
    api = api_of(request)
    if not api.options.slot_actions:
        raise NotSupported("saving and restoring slots is off; start the server with --slot-save-path DIR")
    api.check_ready()
    number, wanted = request.path_params["id_slot"], request.query_params.get("action", "")
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise InvalidRequest(f"'{number[:20]}' is no slot; slots have numbers, from 0 on")
    if wanted not in list(SlotAction):
        raise InvalidRequest(
            f"the action '{wanted[:20]}' is not known; use ?action=save, ?action=restore or ?action=erase"
        )
    slot, action = int(number), SlotAction(wanted)
    filename = "" if action is SlotAction.ERASE else (await read_body(request, SlotFile)).filename
    done = await unless_client_leaves(request, api.engine.act_on_slot(slot, action, filename))
    shown: dict[str, Any] = {"id_slot": slot}
    match action:
        case SlotAction.ERASE:
            shown["n_erased"] = done.n_tokens
        case SlotAction.SAVE:
            shown |= {"filename": filename, "n_saved": done.n_tokens, "n_written": done.n_bytes}
            shown["timings"] = {"save_ms": done.ms}
        case SlotAction.RESTORE:
            shown |= {"filename": filename, "n_restored": done.n_tokens, "n_read": done.n_bytes}
            shown["timings"] = {"restore_ms": done.ms}
    return Response(to_json(shown), media_type="application/json")


@router.get(
    "/metrics",
    responses=gives("Prometheus text.", media_types=("text/plain",), errors=(401, 501)),
)
async def get_metrics(request: Request) -> Response:
    """Answers while the model loads as well: what state the engine is in is one of the metrics."""
    api = api_of(request)
    if not api.options.metrics:
        raise NotSupported("the metrics endpoint is off; start the server with --metrics")
    try:
        facts = api.engine.facts
    except Unavailable:
        facts = None
    text = api.metrics.render(api.engine.snapshot, api.engine.status, facts, api.engine.loads)
    headers = {"Process-Start-Time-Unix": str(api.started_at), "Content-Type": CONTENT_TYPE}
    return Response(text, headers=headers)


def _slot(view: SlotView, api: Api) -> dict[str, Any]:
    """llama.cpp's fields, `state`, and the name of the key. Nothing that a client wrote."""
    shown: dict[str, Any] = {
        "id": view.id,
        "n_ctx": view.n_ctx,
        "speculative": False,
        "is_processing": view.state is not SlotState.IDLE,
        "state": view.state.value,
        "n_kept": view.n_kept,
    }
    if view.job_id is None:
        return shown
    job = api.engine.jobs.get(view.job_id)
    return shown | {
        "id_task": view.job_id,
        "key": job.owner if job is not None else "",
        "priority": job.priority if job is not None else 0,
        "n_prompt_tokens": view.n_prompt,
        "n_prompt_tokens_processed": max(0, view.n_processed - view.n_cached),
        "n_prompt_tokens_cache": view.n_cached,
        "params": settings(job, streams=True, with_texts=False) if job is not None else {},
        "next_token": [
            {
                "has_next_token": view.state is SlotState.GENERATING,
                "n_remain": _remaining(job, view),
                "n_decoded": view.n_decoded,
            }
        ],
    }


def _remaining(job: Job | None, view: SlotView) -> int:
    """Tokens left of max_tokens; -1: no limit but the context."""
    return -1 if job is None or job.max_tokens < 0 else max(0, job.max_tokens - view.n_decoded)
