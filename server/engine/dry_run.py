"""A model and contexts without their memory: what llama.cpp would take, by its own arithmetic, in a process of its own.

    python -m server.engine.dry_run < request.json

`no_alloc` makes llama.cpp read the headers and reserve its graphs without allocating: 434 GiB of weights take half a
second. The answer is JSON: for each context the bytes of each buffer type, for weights, cache and compute buffer.
server/fit/probe.py asks; a process of its own, because a native abort must cost nothing but this answer.

Bytes come from llama.cpp's breakdown (server/engine/breakdown.py), where that cannot be read from the log, which rounds
to 0.01 MiB.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import msgspec

from server.engine import native_params
from server.engine.breakdown import BufferBytes, read_breakdown
from server.engine.ggml import Ggml, load_bindings
from server.engine.native_log import NativeLog
from server.engine.options import ModelOptions
from server.errors import GlmserveError
from server.gguf import read_header

_MIB = 1 << 20
_CONTEXT_TYPE_MTP = 1  # enum llama_context_type


class DryContext(msgspec.Struct, frozen=True):
    """What differs from the request's ModelOptions; see llama_context_params. 0 or None: as those say."""

    n_ctx: int = 0
    n_slots: int = 0
    n_seq_max: int = 0
    n_batch: int = 0
    n_ubatch: int = 0
    n_outputs_max: int = 0
    kv_unified: bool | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    flash_attn: str | None = None
    swa_full: bool = False
    mtp: bool = False  # the context that drafts with the NextN block


class DryRequest(msgspec.Struct, frozen=True):
    model: ModelOptions
    contexts: tuple[DryContext, ...]
    load_mtp: bool = False
    backends: tuple[str, ...] = ()  # backend libraries to load first


class DryAnswer(msgspec.Struct, frozen=True):
    """One context; `error` says why llama.cpp refused it, and then the rest is empty."""

    n_ctx: int = 0
    n_ctx_seq: int = 0
    pipelined: bool = False
    exact: bool = False  # False: rounded by the log to 0.01 MiB
    buffers: tuple[BufferBytes, ...] = ()
    error: str = ""


class DryReport(msgspec.Struct, frozen=True):
    """`error`: the model could not be loaded, so that there are no contexts."""

    contexts: tuple[DryAnswer, ...] = ()
    error: str = ""


def main() -> int:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=DryRequest)
    try:
        report = run(request)
    except GlmserveError as error:
        report = DryReport(error=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return 0


def run(request: DryRequest) -> DryReport:
    """Load without memory and try each context. Raises what native_params.build raises."""
    bindings = load_bindings()
    lines: list[str] = []
    log = _Log(bindings, lines)
    log.install()
    try:
        bindings.llama_backend_init()
        ggml = Ggml(bindings)
        for path in request.backends:
            ggml.load_backend(path)
        if request.model.rpc_servers:
            ggml.add_rpc_servers(request.model.rpc_servers)
        params = native_params.build(bindings, ggml, request.model, read_header(request.model.path))
        params.model.no_alloc = True
        params.model.load_mode = native_params.LOAD_MODES["none"]  # llama.cpp asserts when a mapped model has no memory
        params.model.load_mtp = request.load_mtp
        model = bindings.llama_model_load_from_file(request.model.path.encode(), params.model)
        if not model:
            return DryReport(error=log.reason())
        n_devices = len(params.devices)
        answers = [
            _try(bindings, ggml, log, lines, model, params.context, n_devices, each) for each in request.contexts
        ]
        bindings.llama_model_free(model)
        return DryReport(contexts=tuple(answers))
    finally:
        log.remove()


def _try(
    bindings: ModuleType,
    ggml: Ggml,
    log: _Log,
    lines: list[str],
    model: int,
    base: Any,
    n_devices: int,
    dry: DryContext,
) -> DryAnswer:
    params = type(base).from_buffer_copy(base)
    _apply(params, dry)
    lines.clear()
    log.clear()
    context = bindings.llama_init_from_model(model, params)
    if not context:
        return DryAnswer(error=log.reason())
    buffers = read_breakdown(bindings, ggml, context)
    answer = DryAnswer(
        n_ctx=int(bindings.llama_n_ctx(context)),
        n_ctx_seq=int(bindings.llama_n_ctx_seq(context)),
        pipelined=any("pipeline parallelism enabled" in line for line in lines),
        exact=buffers is not None,
        buffers=tuple(_read_log(lines) if buffers is None else buffers),
    )
    bindings.llama_free(context)
    return answer


def _apply(params: Any, dry: DryContext) -> None:
    given = {name: value for name in ("n_ctx", "n_batch", "n_ubatch") if (value := getattr(dry, name))}
    for name, value in given.items():
        setattr(params, name, value)
    params.n_ubatch = min(params.n_ubatch, params.n_batch)
    if dry.n_slots:
        params.n_seq_max = params.n_outputs_max = dry.n_slots
    params.n_seq_max = dry.n_seq_max or params.n_seq_max
    # llama_context asserts that there is a row of logits for each sequence, used or not
    params.n_outputs_max = max(dry.n_outputs_max or params.n_outputs_max, params.n_seq_max)
    params.swa_full = dry.swa_full
    if dry.kv_unified is not None:
        params.kv_unified = dry.kv_unified
    if dry.cache_type_k is not None:
        params.type_k = native_params.CACHE_TYPES[dry.cache_type_k]
    if dry.cache_type_v is not None:
        params.type_v = native_params.CACHE_TYPES[dry.cache_type_v]
    if dry.flash_attn is not None:
        params.flash_attn_type = native_params.FLASH_ATTENTION[dry.flash_attn]
    if dry.mtp:
        params.ctx_type = _CONTEXT_TYPE_MTP


class _Log(NativeLog):
    """Keeps every line, too: some numbers are told nowhere else."""

    def __init__(self, bindings: ModuleType, lines: list[str]) -> None:
        super().__init__(bindings, "error")
        self._lines = lines

    def _on_text(self, level: int, text: bytes, user_data: int | None) -> None:
        self._lines.append(text.decode("utf-8", errors="replace"))
        super()._on_text(level, text, user_data)


# ── rounded bytes ────────────────────────────────────────────────────────────────────────────────────────────────────

_CACHE_LINE = re.compile(r": size = +([\d.]+) MiB \( *\d+ cells")
_COMPUTE_LINE = re.compile(r": +(\S+) compute buffer size = +([\d.]+) MiB")


def _read_log(lines: list[str]) -> list[BufferBytes]:
    """Compute buffers by device; the caches of all devices under the name ""."""
    cache = sum(round(float(match[1]) * _MIB) for line in lines if (match := _CACHE_LINE.search(line)))
    compute = [
        BufferBytes(match[1], 0, 0, round(float(match[2]) * _MIB))
        for line in lines
        if (match := _COMPUTE_LINE.search(line))
    ]
    return [BufferBytes("", 0, cache, 0), *compute]


if __name__ == "__main__":
    sys.exit(main())
