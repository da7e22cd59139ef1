"""The model in llama.cpp, through its low-level bindings: logits of the trunk and of the NextN layer, greedy answers.

One sequence at a time, for comparing and replaying. It needs no PyTorch; the tests use it too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext
from numpy.typing import NDArray

CACHE_TYPES = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}

Floats = NDArray[np.float32]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _drop_log(_level: int, _text: bytes, _user_data: ctypes.c_void_p) -> None:
    """llama.cpp writes every load to stderr otherwise."""


class Llama:
    """A loaded model with one context. Use as a context manager."""

    def __init__(self, path: Path, *, cache: str, flash_attention: bool, n_ctx: int, n_ubatch: int = 512) -> None:
        self._close = ExitStack()
        if not os.environ.get("TINY_GLM_LOG"):
            llama_cpp.llama_log_set(_drop_log, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = False  # AMX buffers abort with latent attention
        parameters.load_mtp = True
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if model is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._model = model
        self._close.callback(llama_cpp.llama_model_free, model)
        vocab = llama_cpp.llama_model_get_vocab(model)
        assert vocab is not None
        self._vocab = vocab
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.width = llama_cpp.llama_model_n_embd(model)

        self._context_parameters = llama_cpp.llama_context_default_params()
        self._context_parameters.n_ctx = self._context_parameters.n_batch = n_ctx
        self._context_parameters.n_ubatch = n_ubatch
        self._context_parameters.n_threads = self._context_parameters.n_threads_batch = 1
        self._context_parameters.type_k = self._context_parameters.type_v = CACHE_TYPES[cache]
        self._context_parameters.flash_attn_type = int(flash_attention)
        self._context = self._new_context()
        self._draft_context: llama_cpp.llama_context_p | None = None

    def _new_context(self) -> llama_cpp.llama_context_p:
        context = llama_cpp.llama_init_from_model(self._model, self._context_parameters)
        if context is None:
            raise RuntimeError("llama.cpp cannot make a context with these parameters")
        self._close.callback(llama_cpp.llama_free, context)
        return llama_cpp.llama_context_p(context)

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close.close()

    # ── vocabulary ───────────────────────────────────────────────────────────────────────────────────────────────────

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), room, len(room), False, parse_special)
        return list(room[:n])

    def text(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        room = ctypes.create_string_buffer(128)
        n = llama_cpp.llama_token_to_piece(self._vocab, token, room, len(room), 0, True)
        return room.raw[:n]

    def is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    # ── the trunk ────────────────────────────────────────────────────────────────────────────────────────────────────

    def logits(self, tokens: Sequence[int]) -> Floats:
        """(T, V): what the trunk expects after each token."""
        self._clear(self._context)
        self._decode(tokens, 0, all_rows=True)
        rows = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, (len(tokens), self.n_vocab)).copy()

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The likeliest continuation, up to and with the token that ends the turn."""
        self._clear(self._context)
        tokens: list[int] = []
        pending = list(prompt)
        position = 0
        while len(tokens) < max_tokens:
            self._decode(pending, position, all_rows=False)
            position += len(pending)
            row = llama_cpp.llama_get_logits_ith(self._context, -1)
            token = int(np.argmax(np.ctypeslib.as_array(row, (self.n_vocab,))))
            tokens.append(token)
            pending = [token]
            if self.is_end(token):
                break
        return tokens

    def _clear(self, context: llama_cpp.llama_context_p) -> None:
        memory = llama_cpp.llama_get_memory(context)
        assert memory is not None
        llama_cpp.llama_memory_clear(memory, False)

    def _decode(self, tokens: Sequence[int], start: int, *, all_rows: bool) -> None:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = all_rows or i == len(tokens) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    # ── the NextN layer ──────────────────────────────────────────────────────────────────────────────────────────────

    def draft_logits(self, tokens: Sequence[int]) -> Floats:
        """(T, V): the first draft, what the NextN layer expects after each token, given the trunk's hidden states."""
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, False)
        self.logits(tokens)
        states = llama_cpp_ext.llama_get_embeddings_nextn(self._context)
        hidden = np.ctypeslib.as_array(states, (len(tokens), self.width)).copy()
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, False, False)
        previous = np.vstack((np.zeros((1, self.width), np.float32), hidden[:-1]))

        if self._draft_context is None:
            self._context_parameters.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
            self._draft_context = self._new_context()
        context = self._draft_context
        self._clear(context)
        llama_cpp_ext.llama_set_embeddings_nextn(context, True, True)
        batch = llama_cpp.llama_batch_ext_init(context)
        assert batch is not None
        for i, token in enumerate(tokens):
            row = llama_cpp.llama_embd(previous[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, self.width)
            llama_cpp.llama_batch_ext_add_token(batch, 0, token)
            llama_cpp.llama_batch_ext_set_embd_token(batch, i, row)
            llama_cpp.llama_batch_ext_set_pos(batch, i, ctypes.byref(llama_cpp.llama_pos(i)))
            llama_cpp.llama_batch_ext_set_output_logits(batch, i, True)
        status = llama_cpp.llama_process(context, llama_cpp.LLAMA_PROCESS_TYPE_DECODE, batch)
        llama_cpp.llama_batch_ext_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_process returned {status}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(tokens), self.n_vocab)).copy()
