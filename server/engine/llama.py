"""LlamaBackend: one model and one context behind the Backend protocol, over llama_cpp's low-level bindings."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.engine import native_params
from server.engine.backend import DecodeStatus, Logits, Piece, Sampler, State
from server.engine.breakdown import planned_and_actual, read_breakdown
from server.engine.constraint import ConstraintCompiler
from server.engine.ggml import Ggml, load_bindings
from server.engine.guide import Guide
from server.engine.guided_sampler import GuidedSampler, SparingSampler
from server.engine.messages import Constraint, DeviceInfo, Job, ModelFacts, Span
from server.engine.model_facts import read_facts
from server.engine.native_log import NativeLog
from server.engine.native_params import NativeParams
from server.engine.options import EngineOptions, LoadPlan, ModelOptions
from server.engine.sampler_chain import SamplerSource
from server.engine.sampling import LlamaSampler
from server.engine.vocabulary import Vocabulary
from server.errors import LoadError, ModelFileError
from server.gguf import read_header

OnProgress = Callable[[str, float], None]
Plan = Callable[[EngineOptions, list[DeviceInfo]], LoadPlan]

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_MASK_THREADS = 2  # started when the first mask is computed beside a decode

_STATUS = {0: DecodeStatus.OK, 1: DecodeStatus.NO_ROOM, 2: DecodeStatus.ABORTED}  # else FAILED


@dataclass(frozen=True, slots=True)
class _Native:
    """Addresses of the native objects of one loaded model."""

    bindings: ModuleType
    log: NativeLog
    model: int
    context: int
    memory: int


class LlamaBackend:
    """Made by `load`; owns the model, the context and the batch arrays until `close`."""

    def __init__(self, native: _Native, facts: ModelFacts, vocabulary: Vocabulary) -> None:
        bindings = native.bindings
        self._native = native
        self._facts = facts
        self._vocabulary = vocabulary
        self._decode = bindings.llama_decode
        self._seq_rm = bindings.llama_memory_seq_rm
        self._pos_max = bindings.llama_memory_seq_pos_max
        self._n_swa = int(bindings.llama_model_n_swa(native.model))
        self._recurrent = _is_recurrent(bindings, native.model)
        n_sequences = int(bindings.llama_n_seq_max(native.context))
        # a sequence that no job uses: states of parts of sequences are moved through it
        self._transit = n_sequences - 1 if n_sequences > facts.n_sequences > 0 else None
        # (source, target) of copies between streams; llama.cpp moves their bytes in the next decode only
        self._unfinished_copies: set[int] = set()
        self._batch = _Batch(bindings, facts.n_batch)
        self._closed = False
        self._constraints = ConstraintCompiler(vocabulary.token_table)
        self._mask_threads = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="engine-mask")
        self._source = SamplerSource(
            bindings=bindings,
            context=native.context,
            vocabulary=vocabulary,
            n_ctx=facts.n_ctx_seq,
            read_row=_row_reader(bindings),
            outputs=self._batch.outputs,
        )

    @classmethod
    def load(cls, options: EngineOptions, on_progress: OnProgress, plan: Plan | None = None) -> LlamaBackend:
        """Load the model and create its context. `on_progress` gets a phase and a share from 0 to 1; `plan` may settle
        the options once the devices are known.
        Raises ModelFileError, ConfigError or LoadError, each with one sentence that names cause and way out."""
        bindings = load_bindings()
        log = NativeLog(bindings, options.log_level)
        log.install()
        try:
            return cls._load(bindings, log, options, on_progress, plan)
        except BaseException:
            log.remove()
            raise

    @classmethod
    def _load(
        cls, bindings: ModuleType, log: NativeLog, asked: EngineOptions, on_progress: OnProgress, plan: Plan | None
    ) -> LlamaBackend:
        options, memory, warnings = asked.model, dict[str, int](), list[str]()
        if not os.path.isfile(options.path):
            raise ModelFileError(f"there is no model file '{options.path}'; check --model")
        bindings.llama_backend_init()
        if options.numa is not None and options.numa in native_params.NUMA:
            bindings.llama_numa_init(native_params.NUMA[options.numa])
        ggml = Ggml(bindings)
        if options.rpc_servers:
            ggml.add_rpc_servers(options.rpc_servers)
        header = read_header(options.path)
        if plan is not None:
            gpus = native_params.check(bindings, ggml, options, header)
            made = plan(asked, [*gpus, *(each.info for each in ggml.devices() if not each.is_gpu)])
            options, memory, warnings = made.model, made.planned_bytes, made.warnings
        params = native_params.build(bindings, ggml, options, header)
        model = _load_model(bindings, log, options, params, on_progress)
        try:
            on_progress("creating the context", 0.0)
            can_cut = not _is_recurrent(bindings, model) and not bindings.llama_model_n_swa(model)
            params.context.n_seq_max = native_params.n_sequences(options, can_cut=can_cut)
            params.context.n_outputs_max = params.context.n_seq_max  # llama.cpp aborts for less
            context = bindings.llama_init_from_model(model, params.context)
            if not context:
                raise LoadError(f"llama.cpp could not create the context: {log.reason()}")
        except BaseException:
            bindings.llama_model_free(model)
            raise
        on_progress("creating the context", 1.0)
        vocabulary = Vocabulary(bindings, bindings.llama_model_get_vocab(model), _architecture(bindings, model))
        notes = [*params.warnings, *log.warnings()]
        facts = read_facts(bindings, ggml, model, context, vocabulary, options, notes, can_cut=can_cut)
        facts = msgspec.structs.replace(
            facts,
            warnings=[*warnings, *facts.warnings],
            pipelined=log.pipelined,
            memory=planned_and_actual(memory, read_breakdown(bindings, ggml, context), facts.devices),
        )
        native = _Native(bindings, log, model, context, bindings.llama_get_memory(context))
        return cls(native, facts, vocabulary)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    # ── vocabulary ───────────────────────────────────────────────────────────────────────────────────────────────────

    def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]:
        return self._vocabulary.tokenize(spans, add_special=add_special)

    def detokenize(self, tokens: list[int], *, show_special: bool) -> str:
        return self._vocabulary.detokenize(tokens, show_special=show_special)

    def piece(self, token: int, *, show_special: bool) -> bytes:
        return self._vocabulary.piece(token, show_special=show_special)

    def is_end(self, token: int) -> bool:
        return token in self._vocabulary.end_tokens

    def is_control(self, token: int) -> bool:
        return bool(self._native.bindings.llama_vocab_is_control(self._vocabulary.handle, token))

    def warm_up_constraints(self) -> None:
        self._constraints.warm_up()

    def prepare(self, constraint: Constraint) -> tuple[str, ...]:
        return self._constraints.prepare(constraint).warnings

    @property
    def end_tokens(self) -> frozenset[int]:
        return self._vocabulary.end_tokens

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def decode(self, pieces: list[Piece]) -> DecodeStatus:
        """Raises ValueError for a batch that llama.cpp would abort the process over."""
        batch = self._batch
        n_outputs = batch.fill(pieces)
        if n_outputs > self._facts.n_slots:
            raise ValueError(f"{n_outputs} rows of logits were asked for, but the context has {self._facts.n_slots}")
        status = _STATUS.get(self._decode(self._native.context, batch.native), DecodeStatus.FAILED)
        if status is DecodeStatus.OK:
            self._unfinished_copies.clear()
        return status

    def logits(self, row: int) -> NDArray[np.float32]:
        """View of the logits of a batch row, valid until the next decode."""
        return self._source.logits(row)

    def sampler(self, job: Job) -> Sampler:
        self._vocabulary.require(job.tokens)
        if job.constraint is not None:
            guide = Guide(self._constraints, job.constraint, job.free_block, self._mask_threads)
            return GuidedSampler(LlamaSampler(self._source, job), guide)
        chain = LlamaSampler(self._source, job)
        if job.sampling.grammar and job.free_block is not None:
            return SparingSampler(chain, job.free_block, self._vocabulary.end_tokens)
        return chain

    # ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, sequence: int, n_tokens: int) -> bool:
        memory = self._native.memory
        if n_tokens <= 0:
            self._seq_rm(memory, sequence, -1, -1)  # never fails for a whole sequence
            return True
        if n_tokens > self._pos_max(memory, sequence):
            return True
        if self._recurrent or self._lost_window(sequence, n_tokens):
            return False
        return bool(self._seq_rm(memory, sequence, n_tokens, -1))

    def _lost_window(self, sequence: int, n_tokens: int) -> bool:
        """With sliding-window attention old cells are gone; going back needs the window before `n_tokens`."""
        if self._n_swa <= 0:
            return False
        oldest = self._native.bindings.llama_memory_seq_pos_min(self._native.memory, sequence)
        return bool(oldest > max(0, n_tokens - self._n_swa))

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        held = self.length(source)
        if source == target or n_tokens > held:
            return False
        if n_tokens < held and (self._recurrent or self._lost_window(source, n_tokens)):
            return False
        memory, copy = self._native.memory, self._native.bindings.llama_memory_seq_cp
        self._seq_rm(memory, target, -1, -1)
        if n_tokens <= 0:
            return True
        if self._facts.kv_unified and not self._recurrent:
            copy(memory, source, target, 0, n_tokens)
            return True
        copy(memory, source, target, -1, -1)  # between streams only the whole is copied
        if not self._facts.kv_unified:
            self._unfinished_copies |= {source, target}
        return self.keep(target, n_tokens)

    def length(self, sequence: int) -> int:
        return int(self._pos_max(self._native.memory, sequence)) + 1

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, sequence: int, start: int, max_bytes: int) -> State | None:
        if not self.is_settled(sequence):
            return None
        if start == 0:
            return self._read_state(sequence, max_bytes)
        if self._transit is None:
            return None
        memory = self._native.memory
        self._native.bindings.llama_memory_seq_cp(memory, sequence, self._transit, start, -1)
        try:
            return self._read_state(self._transit, max_bytes)
        finally:
            self._seq_rm(memory, self._transit, -1, -1)

    def is_settled(self, sequence: int) -> bool:
        return sequence not in self._unfinished_copies

    def restore(self, sequence: int, state: State, start: int, end: int) -> bool:
        if not self.is_settled(sequence):
            return False
        if self._transit is None:
            return start == 0 and self._write_state(sequence, state) and self._ends_at(sequence, end)
        memory, transit = self._native.memory, self._transit
        try:
            if not self._write_state(transit, state) or self.length(transit) < end:
                return False
            self._native.bindings.llama_memory_seq_cp(memory, transit, sequence, start, end)
        finally:
            self._seq_rm(memory, transit, -1, -1)
        return self.length(sequence) == end

    def _ends_at(self, sequence: int, end: int) -> bool:
        if self.length(sequence) >= end and self.keep(sequence, end):
            return True
        self.keep(sequence, 0)
        return False

    def _read_state(self, sequence: int, max_bytes: int) -> State | None:
        bindings, context = self._native.bindings, self._native.context
        n_bytes = int(bindings.llama_state_seq_get_size(context, sequence))
        if not 0 < n_bytes <= max_bytes:
            return None
        state = np.empty(n_bytes, dtype=np.uint8)
        written = bindings.llama_state_seq_get_data(context, state.ctypes.data_as(_BYTES), n_bytes, sequence)
        return state if written == n_bytes else None

    def _write_state(self, sequence: int, state: State) -> bool:
        """The sequence's own cells are dropped first, whether the state is taken or not."""
        bindings, context = self._native.bindings, self._native.context
        read = bindings.llama_state_seq_set_data(context, state.ctypes.data_as(_BYTES), state.nbytes, sequence)
        return bool(read == state.nbytes)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def warm_up(self) -> None:
        """Touch every weight with one token per slot, then decode at full width: n_batch tokens where a GPU allocates
        pools by width, one n_ubatch on the CPU, where further micro-batches reuse the same memory."""
        facts, bindings, native = self._facts, self._native.bindings, self._native
        width = facts.n_batch if any(device.kind != "cpu" for device in facts.devices) else facts.n_ubatch
        bindings.llama_set_warmup(native.context, True)  # all experts of a mixture
        self._warm_step(1)
        bindings.llama_set_warmup(native.context, False)
        self._warm_step(max(1, min(width // facts.n_slots, facts.n_ctx // facts.n_slots, facts.n_ctx_seq)))

    def _warm_step(self, n_tokens: int) -> None:
        token = max(0, self._native.bindings.llama_vocab_bos(self._vocabulary.handle))
        pieces = [Piece(slot, 0, [token] * n_tokens, Logits.LAST) for slot in range(self._facts.n_slots)]
        status = self.decode(pieces)
        if status is DecodeStatus.OK:
            self._native.bindings.llama_synchronize(self._native.context)
        self._native.bindings.llama_memory_clear(self._native.memory, True)
        if status is not DecodeStatus.OK:
            raise LoadError(
                f"the warm-up batch of {n_tokens * len(pieces)} tokens failed ({status.name.lower()}): "
                f"{self._native.log.decisive_line()}; use a smaller --ubatch-size, --ctx-size or --parallel"
            )

    def close(self) -> None:
        """Free the context and the model. Samplers must be closed before. May be called twice."""
        if not self._closed:
            self._closed = True
            self._mask_threads.shutdown()
            self._native.bindings.llama_free(self._native.context)
            self._native.bindings.llama_model_free(self._native.model)
            self._native.log.remove()


class _Batch:
    """The arrays of one llama_batch, made once; rows are written through numpy views."""

    def __init__(self, bindings: ModuleType, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._sequences = np.zeros(capacity, dtype=np.int32)
        self.outputs = np.zeros(capacity, dtype=np.int8)
        self._sequence_counts = np.ones(capacity, dtype=np.int32)
        addresses = self._sequences.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._sequences.itemsize
        self._sequence_pointers = addresses.astype(np.uintp)
        self._steps = np.arange(capacity, dtype=np.int32)
        self._token_items = self._tokens.data
        self._position_items = self._positions.data
        self._sequence_items = self._sequences.data
        self._output_items = self.outputs.data
        self.native = bindings.llama_batch()
        fields: dict[str, NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._sequence_counts,
            "seq_id": self._sequence_pointers,
            "logits": self.outputs,
        }
        types: dict[str, Any] = dict(bindings.llama_batch._fields_)
        for name, array in fields.items():
            setattr(self.native, name, ctypes.cast(array.ctypes.data, types[name]))

    def fill(self, pieces: list[Piece]) -> int:
        """Write the rows of `pieces`; the number of rows with logits. Raises ValueError beyond the capacity."""
        tokens, positions, sequences, outputs = self._tokens, self._positions, self._sequences, self.outputs
        n_rows = sum([len(piece.tokens) for piece in pieces])
        if not 0 < n_rows <= self._capacity:
            raise ValueError(f"a batch of {n_rows} tokens; 1 to {self._capacity} are possible")
        outputs[:] = 0
        n_outputs = row = 0
        for piece in pieces:
            count = len(piece.tokens)
            if count == 1 and piece.logits is Logits.LAST:  # the usual row, without numpy's price for a slice
                self._token_items[row] = piece.tokens[0]
                self._position_items[row] = piece.start
                self._sequence_items[row] = piece.sequence
                self._output_items[row] = 1
                n_outputs += 1
                row += 1
                continue
            end = row + count
            tokens[row:end] = piece.tokens
            np.add(self._steps[:count], piece.start, out=positions[row:end])
            sequences[row:end] = piece.sequence
            match piece.logits:
                case Logits.LAST:
                    outputs[end - 1] = 1
                    n_outputs += 1
                case Logits.ALL:
                    outputs[row:end] = 1
                    n_outputs += count
                case Logits.NONE:
                    pass
            row = end
        self.native.n_tokens = row
        return n_outputs


def _load_model(
    bindings: ModuleType, log: NativeLog, options: ModelOptions, params: NativeParams, on_progress: OnProgress
) -> int:
    failure: list[BaseException] = []

    def report(progress: float, _user_data: int | None) -> bool:
        try:
            on_progress("loading the model", progress)
        except BaseException as error:  # noqa: BLE001  it must not unwind through C; it is raised below
            failure.append(error)
        return not failure

    callback = bindings.llama_progress_callback(report)
    params.model.progress_callback = callback
    log.clear()
    model: int | None = bindings.llama_model_load_from_file(os.fsencode(options.path), params.model)
    if failure:
        if model:
            bindings.llama_model_free(model)
        raise failure[0]
    if not model:
        raise LoadError(f"llama.cpp could not load '{options.path}': {log.decisive_line()}")
    return model


def _is_recurrent(bindings: ModuleType, model: int) -> bool:
    """A recurrent state is one snapshot: it cannot be cut."""
    return bool(bindings.llama_model_is_recurrent(model) or bindings.llama_model_is_hybrid(model))


def _architecture(bindings: ModuleType, model: int) -> str:
    buffer = ctypes.create_string_buffer(128)
    bindings.llama_model_meta_val_str(model, b"general.architecture", buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace")


def _row_reader(bindings: ModuleType) -> Any:
    """llama_get_logits_ith with a plain address as its result: a view of it costs one microsecond."""
    function = bindings._lib["llama_get_logits_ith"]
    function.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    function.restype = ctypes.c_void_p
    return function
