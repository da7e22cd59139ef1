"""Makes a Config of settled settings: reads the files that flags name, finds and checks the model, fills each room's
options. The last station before the server starts; everything it refuses, it refuses with one sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from server.api.options import ApiKey, CorsOptions, GenerationDefaults, HttpOptions, ModelNames, TlsOptions
from server.chat.options import ChatOptions, ReasoningFormat, Thinking
from server.cli.keys import api_keys
from server.cli.model import find_model
from server.cli.sampling_flags import SAMPLING_FIELDS
from server.cli.settings import Settings
from server.config import Config
from server.engine import rules
from server.engine.messages import SamplingOptions
from server.engine.options import (
    DiskOptions,
    EngineOptions,
    FitOptions,
    ModelOptions,
    SchedulerOptions,
    SupervisorOptions,
    TensorOverride,
)
from server.errors import ConfigError
from server.ops.options import LogFormat, LogLevel, LogOptions
from server.store.source import ModelFiles, demo_model, resolve_model, tiny_glm_model

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def build_config(settings: Settings) -> Config:
    """Raises ConfigError and ModelFileError."""
    files = _model_files(settings)
    engine = engine_options(settings, str(files.first))
    rules.check(engine.model, files.header)
    return Config(
        engine=engine,
        supervisor=SupervisorOptions(
            step_timeout_s=settings["step-timeout"], max_failures=settings["max-engine-failures"]
        ),
        http=_http_options(settings, files),
        chat=_chat_options(settings),
        log=LogOptions(
            level=LogLevel(settings["log-level"]), format=LogFormat(settings["log-format"]), file=settings["log-file"]
        ),
        warnings=tuple(settings.warnings),
    )


def _model_files(settings: Settings) -> ModelFiles:
    if settings["demo"]:
        return resolve_model(demo_model() if settings["demo"] == "small" else tiny_glm_model())
    asked = settings["gguf"] or settings["hf-repo"]
    if asked is None:
        raise ConfigError(
            "no model is given: add --gguf with a path, a recipe's name or OWNER/REPO:QUANT, or --demo to try one out"
        )
    return resolve_model(find_model(settings, asked))


def engine_options(settings: Settings, path: str) -> EngineOptions:
    """`path` is the model's first shard."""
    scale = settings["rope-scale"]
    model = ModelOptions(
        path=path,
        n_gpu_layers=settings["n-gpu-layers"],
        split_mode=settings["split-mode"],
        tensor_split=settings["tensor-split"] or (),
        main_gpu=settings["main-gpu"],
        devices=settings["device"] or (),
        tensor_overrides=_tensor_overrides(settings),
        cpu_moe=settings["cpu-moe"],
        n_cpu_moe=settings["n-cpu-moe"] or 0,
        pipeline=settings["pipeline"] != "off",
        load_mode=settings["load-mode"],
        use_extra_bufts=settings["repack"],
        no_host=settings["no-host"],
        check_tensors=settings["check-tensors"],
        n_ctx=settings["ctx-size"],
        n_slots=settings["parallel"],
        kv_unified=settings["kv-unified"],
        n_ctx_slot_max=settings["kv-unified-per-slot"],
        n_batch=settings["batch-size"],
        n_ubatch=settings["ubatch-size"],
        cache_type_k=settings["cache-type-k"],
        cache_type_v=settings["cache-type-v"],
        flash_attn=settings["flash-attn"],
        offload_kqv=settings["kv-offload"],
        op_offload=settings["op-offload"],
        n_threads=_threads(settings["threads"]),
        n_threads_batch=_threads(settings["threads-batch"]),
        numa=settings["numa"],
        rope_scaling=settings["rope-scaling"],
        rope_freq_base=settings["rope-freq-base"],
        rope_freq_scale=1 / scale if scale else settings["rope-freq-scale"],
        warmup=settings["warmup"],
        rpc_servers=settings["rpc"] or (),
    )
    scheduler = SchedulerOptions(
        max_stall_ms=settings["max-stall-ms"],
        cont_batching=settings["cont-batching"],
        max_waiting=settings["max-queue"],
        slot_prompt_similarity=settings["slot-prompt-similarity"],
        cache_ram_bytes=_mib(settings["cache-ram"]),
        cache_idle_slots=settings["cache-idle-slots"],
    )
    return EngineOptions(
        model, scheduler, _fit_options(settings), _disk_options(settings), _native_level(settings["log-level"])
    )


def _fit_options(settings: Settings) -> FitOptions:
    keys = {
        "ctx-size": "n_ctx",
        "parallel": "n_slots",
        "ubatch-size": "n_ubatch",
        "cache-type-k": "cache_type_k",
        "cache-type-v": "cache_type_v",
    }
    given = [name for key, name in keys.items() if settings.given(key) and settings[key]]
    if settings["kv-unified-per-slot"] and settings["ctx-size"]:
        given.append("n_ctx")
    return FitOptions(
        adapts=settings["fit"] == "on",
        least_ctx=settings["fit-ctx"],
        margin_bytes=tuple(mib << 20 for mib in settings["fit-target"]),
        pipeline=settings["pipeline"],
        experts=settings["n-cpu-moe"] is None and not settings["cpu-moe"],
        given=tuple(given),
    )


def _disk_options(settings: Settings) -> DiskOptions:
    folder = settings["cache-disk"]
    return DiskOptions(
        cache_folder=str(Path(folder).expanduser().absolute()) if folder else "",
        cache_limit_bytes=int(settings["cache-disk-limit"] * 2**30),
        slot_folder=_slot_folder(settings),
    )


def _slot_folder(settings: Settings) -> str:
    if settings["slot-save-path"] is None:
        return ""
    path = Path(settings["slot-save-path"]).expanduser().absolute()
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{settings.setting('slot-save-path').where} names '{path}', which is no folder that can be written; make "
            f"it first, for the user that the server runs as"
        )
    return str(path)


def _native_level(level: str) -> str:
    """llama.cpp's info lines are a wall of text, of interest when somebody debugs."""
    return {"info": "warn", "debug": "info"}.get(level, level)


def _mib(number: int) -> int:
    """Bytes; -1 is without limit."""
    return number << 20 if number >= 0 else sys.maxsize


def _threads(number: int | None) -> int:
    """None: -1, the engine decides. 0 and -1 given by hand: every core, as in llama.cpp."""
    if number is None:
        return -1
    return number if number > 0 else os.cpu_count() or 1


def _tensor_overrides(settings: Settings) -> tuple[TensorOverride, ...]:
    given = tuple(TensorOverride(pattern, buffer) for pattern, buffer in settings["override-tensor"] or ())
    dense = (TensorOverride(rf"blk\.{i}\.ffn_(up|down|gate)\.", "CPU") for i in range(settings["n-cpu-ffn"]))
    return (*given, *dense)


def _http_options(settings: Settings, files: ModelFiles) -> HttpOptions:
    tls = None
    if settings["ssl-key-file"]:
        tls = TlsOptions(*(_readable(settings, key) for key in ("ssl-key-file", "ssl-cert-file")))
    return HttpOptions(
        hosts=settings["host"],
        port=settings["port"],
        prefix=settings["api-prefix"],
        model_names=settings["alias"] or (files.name,),
        model_tags=settings["tags"] or (),
        unknown_model=ModelNames(settings["model-names"]),
        api_keys=_api_keys(settings),
        tls=tls,
        cors=CorsOptions(
            origins=settings["cors-origins"],
            methods=settings["cors-methods"],
            headers=settings["cors-headers"],
            credentials=settings["cors-credentials"],
        ),
        timeout_s=settings["timeout"],
        queue_timeout_s=settings["queue-timeout"] or None,
        request_limit_s=settings["request-limit"] or None,
        ping_interval_s=settings["sse-ping-interval"],
        max_body_bytes=int(settings["max-body-mib"] * 1024 * 1024),
        metrics=settings["metrics"],
        props=settings["props"],
        slots=settings["slots"],
        log_cache_misses=settings["log-cache-misses"],
        slot_actions=settings["slot-save-path"] is not None,
        shutdown_grace_s=settings["shutdown-grace"],
        generation=GenerationDefaults(
            sampling=_sampling(settings), max_tokens=settings["predict"], cache_prompt=settings["cache-prompt"]
        ),
    )


def _api_keys(settings: Settings) -> tuple[ApiKey, ...]:
    given = settings["api-key"] or ()
    if not settings["api-key-file"]:
        return api_keys(given, "", "", settings["max-jobs-per-key"])
    where = f"{settings.setting('api-key-file').where} '{settings['api-key-file']}'"
    text = _text_of(settings, "api-key-file")
    keys = api_keys(given, text, where, settings["max-jobs-per-key"])
    if not api_keys((), text, where, 0):
        raise ConfigError(
            f"{where} holds no key, so the server would be open to all; put one key on a line, or leave the flag out"
        )
    return keys


def _sampling(settings: Settings) -> SamplingOptions:
    fields = {field: settings[key] for key, field in SAMPLING_FIELDS.items()}
    breakers = settings["dry-sequence-breaker"]
    grammar = settings["grammar"]
    if settings["grammar-file"]:
        grammar = _text_of(settings, "grammar-file")
    return msgspec.structs.replace(
        SamplingOptions(),
        dry_sequence_breakers=tuple(_unescaped(breaker) for breaker in breakers),
        logit_bias=settings["logit-bias"] or (),
        grammar=grammar,
        **fields,
    )


def _unescaped(text: str) -> str:
    """Replace backslash escapes as a shell's user means them: \\n, \\r, \\t, quotes and the backslash itself."""
    result = []
    chars = iter(text)
    for char in chars:
        if char == "\\":
            following = next(chars, "")
            result.append(_ESCAPES.get(following, char + following))
        else:
            result.append(char)
    return "".join(result)


def _chat_options(settings: Settings) -> ChatOptions:
    template = settings["chat-template"]
    if settings["chat-template-file"]:
        template = _text_of(settings, "chat-template-file")
    return ChatOptions(
        template=template,
        template_kwargs=settings["chat-template-kwargs"] or {},
        thinking=_thinking(settings),
        reasoning_format=ReasoningFormat(settings["reasoning-format"]),
        normalize=settings["normalize-prompts"],
        tool_grammar=settings["tool-grammar"] == "auto",
    )


def _thinking(settings: Settings) -> Thinking:
    switch, effort = settings["reasoning"], settings["reasoning-effort"]
    return Thinking(
        enabled=None if switch == "auto" else switch == "on",
        effort=None if effort == "default" else effort,
        clear=False if settings["reasoning-preserve"] else None,
        budget=settings["reasoning-budget"],
        budget_message=settings["reasoning-budget-message"],
    )


def _readable(settings: Settings, key: str) -> str:
    """The path that a flag names, once it is known to open."""
    path = Path(settings[key]).expanduser()
    try:
        with open(path, "rb"):
            return str(path)
    except OSError as error:
        where = settings.setting(key).where
        raise ConfigError(
            f"{where} names '{path}', which cannot be read: {error.strerror or error}; give a readable file"
        ) from None


def _text_of(settings: Settings, key: str) -> str:
    path = _readable(settings, key)
    try:
        return Path(path).read_text(encoding="utf-8")
    except ValueError:
        raise ConfigError(f"{settings.setting(key).where} names '{path}', which is no UTF-8 text; convert it") from None
