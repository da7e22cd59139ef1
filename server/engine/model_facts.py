"""What a loaded model and its context say about themselves; never computed from flags."""

from __future__ import annotations

import ctypes
import re
from types import ModuleType

from server.engine.ggml import Ggml
from server.engine.messages import DeviceInfo, ModelFacts
from server.engine.options import ModelOptions
from server.engine.vocabulary import Vocabulary

_BINDINGS_VERSION = "llama-cpp-python-0.3.36"  # when the library does not know its commit
_DEGRADED = re.compile(r"mlock|mmap|not supported|fall(?:ing)? ?back|no effect", re.IGNORECASE)


def read_facts(
    bindings: ModuleType,
    ggml: Ggml,
    model: int,
    context: int,
    vocabulary: Vocabulary,
    options: ModelOptions,
    warnings: list[str],
    *,
    can_cut: bool,
) -> ModelFacts:
    """`warnings` are the native lines and notes so far; only those about something lost stay."""
    devices = _devices(bindings, ggml, model)
    n_layer = int(bindings.llama_model_n_layer(model))
    n_ctx_seq = int(bindings.llama_n_ctx_seq(context))
    if options.n_ctx_slot_max > 0:
        n_ctx_seq = min(n_ctx_seq, options.n_ctx_slot_max)
    n_ctx_train = int(bindings.llama_model_n_ctx_train(model))
    on_gpu = any(device.kind in ("gpu", "igpu", "meta") for device in devices)
    asked = options.n_gpu_layers
    template: bytes | None = bindings.llama_model_chat_template(model, None)
    return ModelFacts(
        description=_description(bindings, model),
        architecture=vocabulary.architecture,
        n_ctx=int(bindings.llama_n_ctx(context)),
        n_ctx_seq=n_ctx_seq,
        n_ctx_train=n_ctx_train,
        n_slots=options.n_slots,
        # the last sequence of a unified cache is for moving states in and out
        n_sequences=max(options.n_slots, int(bindings.llama_n_seq_max(context)) - 1) if options.kv_unified else 0,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        can_cut=can_cut,
        n_batch=int(bindings.llama_n_batch(context)),
        n_ubatch=int(bindings.llama_n_ubatch(context)),
        n_vocab=vocabulary.n_tokens,
        vocab_type=int(bindings.llama_vocab_type(vocabulary.handle)),
        n_embd=int(bindings.llama_model_n_embd(model)),
        n_params=int(bindings.llama_model_n_params(model)),
        size_bytes=int(bindings.llama_model_size(model)),
        ftype=_text(bindings.llama_ftype_name(bindings.llama_model_ftype(model))),
        kv_unified=options.kv_unified,
        split_mode=options.split_mode,
        # llama.cpp has no call for it: its own rule, every layer and the output
        n_gpu_layers=min(n_layer + 1, asked if asked is not None and asked >= 0 else n_layer + 1) if on_gpu else 0,
        devices=devices,
        tensor_split=options.tensor_split,
        n_cpu_moe=options.n_cpu_moe,
        load_mode=options.load_mode,
        chat_template=None if template is None else _text(template),
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        adds_bos=vocabulary.adds_bos,
        control_texts=vocabulary.control_texts,
        build_info=f"b0-{ggml.commit() or _BINDINGS_VERSION}",
        warnings=[line for line in warnings if _DEGRADED.search(line)] + _notes(options, n_ctx_seq, n_ctx_train),
    )


def _notes(options: ModelOptions, n_ctx_seq: int, n_ctx_train: int) -> list[str]:
    notes = []
    if n_ctx_seq > n_ctx_train:
        notes.append(
            f"one request may use {n_ctx_seq} tokens, but the model was trained for {n_ctx_train}: answers may get "
            f"worse beyond that; lower --ctx-size"
        )
    if not options.use_extra_bufts:
        notes.append("weights are not repacked for this CPU (--no-repack): prompts are read more slowly")
    return notes


def _devices(bindings: ModuleType, ggml: Ggml, model: int) -> list[DeviceInfo]:
    """The devices that hold the model, the CPU last. The two functions are C++ (src/llama-ext.h), so a library from
    another compiler may lack these names; then every device of the machine is listed."""
    present = [device.info for device in ggml.devices()]
    try:
        count = bindings._lib["_Z21llama_model_n_devicesPK11llama_model"]
        get = bindings._lib["_Z22llama_model_get_devicePK11llama_modeli"]
    except AttributeError:
        return present
    count.argtypes, get.argtypes, get.restype = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int], ctypes.c_void_p
    used = [ggml.info(get(model, index)) for index in range(count(model))]
    return [*used, *(info for info in present if info.kind == "cpu")]


def _description(bindings: ModuleType, model: int) -> str:
    buffer = ctypes.create_string_buffer(256)
    bindings.llama_model_desc(model, buffer, len(buffer))
    return _text(buffer.value)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", errors="replace")
