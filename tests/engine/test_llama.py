from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from server.engine import native_params, rules
from server.engine.backend import DecodeStatus, Logits, Piece
from server.engine.ggml import Ggml, load_bindings
from server.engine.llama import LlamaBackend
from server.engine.messages import Job, SamplingOptions, Span
from server.engine.native_log import NativeLog
from server.engine.options import EngineOptions, ModelOptions, TensorOverride
from server.engine.vocabulary import Vocabulary
from server.errors import ConfigError, InvalidRequest, LoadError, ModelFileError
from server.gguf import Header
from tests.support.tiny_gguf import CHAT_TEMPLATE, CONTROL_TEXTS, EOS_TEXT, vocabulary, write_tiny_gguf
from tests.support.tiny_memories import WINDOW, write_recurrent_gguf, write_sliding_window_gguf

N_SLOTS = 4
LETTERS = [270 + i for i in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def load(model: Path, **options: object) -> LlamaBackend:
    defaults: dict[str, object] = {"n_ctx": 1024, "n_slots": N_SLOTS, "n_batch": 128, "flash_attn": "off"}
    made = ModelOptions(str(model), n_threads=1, **(defaults | {"n_ubatch": 64} | options))  # type: ignore[arg-type]
    return LlamaBackend.load(EngineOptions(made), lambda phase, progress: None)


@pytest.fixture(scope="module")
def shared_backend(model: Path) -> Iterator[LlamaBackend]:
    backend = load(model)
    yield backend
    backend.close()


@pytest.fixture
def backend(shared_backend: LlamaBackend) -> LlamaBackend:
    for sequence in range(N_SLOTS):
        shared_backend.keep(sequence, 0)
    return shared_backend


def read(backend: LlamaBackend, sequence: int, start: int, tokens: list[int]) -> DecodeStatus:
    return backend.decode([Piece(sequence, start, tokens, Logits.LAST)])


def logits(backend: LlamaBackend, row: int) -> NDArray[np.float32]:
    return backend._source.logits(row).copy()


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_facts_come_from_the_model_and_the_context(backend: LlamaBackend) -> None:
    facts = backend.facts
    assert facts.architecture == "llama"
    assert (facts.n_ctx, facts.n_ctx_seq, facts.n_ctx_train) == (1024, 1024, 4096)
    assert (facts.n_slots, facts.n_batch, facts.n_ubatch) == (N_SLOTS, 128, 64)
    assert (facts.n_vocab, facts.n_embd) == (len(vocabulary()), 64)
    assert facts.size_bytes == 4 * facts.n_params
    assert facts.ftype == "all F32"
    assert (facts.n_gpu_layers, [device.kind for device in facts.devices]) == (0, ["cpu"])
    assert facts.chat_template == CHAT_TEMPLATE
    assert (facts.bos_text, facts.eos_text, facts.adds_bos) == ("<s>", EOS_TEXT, True)
    assert set(facts.control_texts) == set(CONTROL_TEXTS)
    assert facts.build_info.startswith("b0-")
    assert facts.warnings == []


def test_the_context_of_a_request_is_what_llama_cpp_says(model: Path) -> None:
    """Partitioned: 1000 cells for 3 slots are padded by llama.cpp, not divided by us."""
    backend = load(model, n_ctx=1000, n_slots=3, kv_unified=False)
    assert (backend.facts.n_ctx, backend.facts.n_ctx_seq) == (1536, 512)
    assert not backend.facts.kv_unified
    backend.close()


def test_one_request_may_be_held_to_less_than_the_cache(model: Path) -> None:
    backend = load(model, n_slots=2, n_ctx=2048, kv_unified=True, n_ctx_slot_max=512)
    assert (backend.facts.n_ctx, backend.facts.n_ctx_seq) == (2048, 512)
    backend.close()


def test_a_context_beyond_training_is_noted(model: Path) -> None:
    backend = load(model, n_ctx=8192, use_extra_bufts=False)
    assert [line for line in backend.facts.warnings if "trained for 4096" in line]
    assert [line for line in backend.facts.warnings if "--no-repack" in line]
    backend.close()


def test_progress_names_the_phases_in_order(model: Path) -> None:
    seen: list[tuple[str, float]] = []
    options = EngineOptions(ModelOptions(str(model), n_ctx=256, n_threads=1))
    LlamaBackend.load(options, lambda phase, progress: seen.append((phase, progress))).close()
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["loading the model", "creating the context"]
    assert ("loading the model", 1.0) in seen
    assert seen[-1] == ("creating the context", 1.0)


def test_an_error_in_the_progress_callback_stops_the_load(model: Path) -> None:
    def fail(phase: str, progress: float) -> None:
        raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError, match="nobody listens"):
        LlamaBackend.load(EngineOptions(ModelOptions(str(model))), fail)


def test_a_missing_model_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nothing\.gguf"):
        load(tmp_path / "nothing.gguf")


def test_a_refused_model_says_llama_cpps_reason(tmp_path: Path) -> None:
    odd = write_tiny_gguf(tmp_path / "odd.gguf", architecture="not-an-architecture")
    with pytest.raises(LoadError, match="unknown model architecture: 'not-an-architecture'"):
        load(odd)


def test_a_refused_context_says_llama_cpps_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "check", lambda *_: None)
    with pytest.raises(LoadError, match=r"could not create the context: quantized V cache requires flash_attn"):
        load(model, flash_attn="off", cache_type_v="q8_0")


def test_heads_that_blocks_of_a_quantised_cache_do_not_divide(tmp_path: Path) -> None:
    narrow = write_tiny_gguf(tmp_path / "narrow.gguf", n_head=4)
    with pytest.raises(ConfigError, match=r"--cache-type-k q8_0 .*do not divide .* key heads of 16"):
        load(narrow, flash_attn="auto", cache_type_k="q8_0")
    with pytest.raises(ConfigError, match=r"--cache-type-v q4_0 .*do not divide .* value heads of 16"):
        load(narrow, flash_attn="on", cache_type_v="q4_0")
    with pytest.raises(ConfigError, match=r"--cache-type-k q8_0"):  # one head of 16 makes half a block: it would abort
        load(narrow, flash_attn="off", cache_type_k="q8_0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_slots": 257, "n_batch": 512}, "--parallel 257"),
        ({"n_slots": 0}, "--parallel 0"),
        ({"n_slots": 8, "n_batch": 4}, "--batch-size 4 is smaller than --parallel 8"),
        ({"n_batch": 128, "n_ubatch": 256}, "--ubatch-size 256 is larger than --batch-size 128"),
        ({"n_ubatch": 0}, "--ubatch-size 0"),
        ({"cache_type_v": "q8_0"}, "--cache-type-v q8_0 needs flash attention, and --flash-attn is off"),
        ({"cache_type_k": "q3_k"}, "--cache-type-k 'q3_k' is not known"),
        ({"flash_attn": "maybe"}, "--flash-attn 'maybe'"),
        ({"load_mode": "fast"}, "--load-mode 'fast'"),
        ({"split_mode": "row"}, "--split-mode 'row'"),
        ({"numa": "everywhere"}, "--numa 'everywhere'"),
        ({"rope_scaling": "cubic"}, "--rope-scaling 'cubic'"),
        ({"devices": ("CUDA99",)}, "--device 'CUDA99' is not here; usable devices:"),
        ({"devices": ("none",), "n_gpu_layers": 7}, "--n-gpu-layers 7 asks for a GPU"),
        ({"devices": ("none",), "n_gpu_layers": -1}, "--n-gpu-layers all asks for a GPU"),
        ({"devices": ("none",), "split_mode": "tensor", "flash_attn": "on"}, "--split-mode tensor needs a GPU"),
        ({"split_mode": "tensor"}, "--split-mode tensor needs flash attention"),
        ({"split_mode": "tensor", "flash_attn": "on", "cache_type_k": "q8_0"}, "cannot use a q8_0 cache"),
        ({"tensor_overrides": (TensorOverride("exps", "Moon"),)}, "--override-tensor exps=Moon"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_load(
    model: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(model, **options)
    assert words in caught.value.message


def build_params(metadata: dict[str, int | str], options: ModelOptions) -> native_params.NativeParams:
    bindings = load_bindings()
    header = Header("x.gguf", 3, metadata, (), 32, 0, 0)
    return native_params.build(bindings, Ggml(bindings), options, header)


MLA: dict[str, int | str] = {"general.architecture": "glm-dsa", "glm-dsa.attention.key_length_mla": 256}


def test_latent_attention_needs_one_cache_type() -> None:
    with pytest.raises(ConfigError, match="set both flags to the same type"):
        build_params(MLA, ModelOptions("x.gguf", cache_type_k="q8_0"))
    build_params(MLA, ModelOptions("x.gguf", cache_type_k="q8_0", cache_type_v="q8_0"))


def test_the_cpu_never_computes_unawares_where_gpus_are_meant(tmp_path: Path) -> None:
    here, gone = tmp_path / "nvidia0", str(tmp_path / "none")
    here.touch()
    (warning,) = rules.check_that_the_cpu_is_meant(ModelOptions("x.gguf"), False, str(here))
    assert "llama.cpp sees none" in warning
    assert rules.check_that_the_cpu_is_meant(ModelOptions("x.gguf"), False, gone) == []
    assert rules.check_that_the_cpu_is_meant(ModelOptions("x.gguf"), True, str(here)) == []
    for meant in (ModelOptions("x.gguf", n_gpu_layers=0), ModelOptions("x.gguf", devices=("none",))):
        assert rules.check_that_the_cpu_is_meant(meant, False, str(here)) == []
    with pytest.raises(ConfigError, match="--tensor-split asks for a GPU"):
        rules.check_that_the_cpu_is_meant(ModelOptions("x.gguf", tensor_split=(1.0, 1.0)), False, gone)


def test_tensor_split_is_refused_for_architectures_without_it() -> None:
    with pytest.raises(ConfigError, match=r"not possible with 'glm-dsa' models in this .*; use --split-mode layer"):
        build_params(MLA, ModelOptions("x.gguf", split_mode="tensor", flash_attn="on"))


def test_a_small_batch_lowers_the_default_micro_batch() -> None:
    params = build_params({"general.architecture": "llama"}, ModelOptions("x.gguf", n_batch=256))
    assert params.context.n_ubatch == 256


def test_shares_for_gpus_that_are_not_there_are_noted() -> None:
    options = ModelOptions("x.gguf", devices=("none",), tensor_split=(1.0, 2.0))
    assert ["--tensor-split" in line for line in build_params({}, options).warnings] == [True]


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attn": "auto", "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"use_extra_bufts": False, "no_host": True, "check_tensors": True},
        {"load_mode": "none", "n_cpu_moe": 1, "cpu_moe": True},
        {"load_mode": "mmap", "rope_scaling": "yarn", "rope_freq_scale": 0.5, "rope_freq_base": 20000.0},
        {"tensor_overrides": (TensorOverride("ffn", "CPU"),), "offload_kqv": False, "op_offload": False},
    ],
)
def test_rarer_options_load_and_decode(model: Path, options: dict[str, object]) -> None:
    backend = load(model, **options)
    assert read(backend, 0, 0, LETTERS[:20]) is DecodeStatus.OK
    assert np.isfinite(logits(backend, 19)).all()
    backend.close()


def test_close_twice(model: Path) -> None:
    backend = load(model, n_ctx=256)
    backend.close()
    backend.close()


# ── native log ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_decisive_line_tells_cause_and_consequence() -> None:
    log = NativeLog(load_bindings(), "error")
    for level, text in [
        (3, b"load_tensors: this is a warning\n"),
        (4, b"ggml_cuda: cudaMalloc failed: out of memory\n"),
        (4, b"llama_model_load: error loading model: unable to allocate CUDA0 buffer\n"),
        (4, b"llama_model_load_from_file_impl: failed to load model\n"),
    ]:
        log._on_text(level, text, None)
    assert log.decisive_line() == "cudaMalloc failed: out of memory; unable to allocate CUDA0 buffer"
    assert log.reason().endswith("; use a smaller --ubatch-size, --ctx-size or --parallel")
    assert log.warnings() == ["this is a warning"]
    log.clear()
    assert log.decisive_line() == "llama.cpp gave no reason"


def test_native_lines_below_the_level_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    log = NativeLog(load_bindings(), "warn")
    for level, text in [(2, b"news\n"), (5, b"more news\n"), (3, b"half a "), (5, b"warning\n"), (1, b"noise\n")]:
        log._on_text(level, text, None)
    assert capfd.readouterr().err == "half a warning\n"


# ── vocabulary ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokens_give_the_text_back(shared_backend: LlamaBackend, text: str) -> None:
    tokens = shared_backend.tokenize([Span(text, special=False)], add_special=False)
    assert shared_backend.detokenize(tokens, show_special=True) == text
    assert b"".join(shared_backend.piece(token, show_special=True) for token in tokens) == text.encode()


def test_control_tokens_only_where_they_are_meant(backend: LlamaBackend) -> None:
    (user,) = backend.tokenize([Span("<|user|>", special=True)], add_special=False)
    literal = backend.tokenize([Span("<|user|>", special=False)], add_special=False)
    assert backend.piece(user, show_special=True) == b"<|user|>"
    assert backend.piece(user, show_special=False) == b""
    assert user not in literal
    mixed = [Span("<|user|>", special=True), Span("a <|user|> b", special=False), Span("<|assistant|>", special=True)]
    tokens = backend.tokenize(mixed, add_special=True)
    assert tokens.count(user) == 1
    assert tokens[0] == vocabulary().index("<s>")
    assert backend.detokenize(tokens, show_special=True) == "<s><|user|>a <|user|> b<|assistant|>"


def test_a_control_token_does_not_arise_across_a_border(backend: LlamaBackend) -> None:
    (user,) = backend.tokenize([Span("<|user|>", special=True)], add_special=False)
    for spans in (
        [Span("<|us", special=True), Span("er|> hi", special=False)],
        [Span("<|us", special=False), Span("er|>", special=True)],
        [Span("<|us", special=False), Span("er|>", special=False)],
    ):
        assert user not in backend.tokenize(spans, add_special=False)
    halves = [Span("<|us", special=True), Span("er|>", special=True)]
    assert backend.tokenize(halves, add_special=False) == [user]


def test_harmless_spans_tokenise_like_one_string(backend: LlamaBackend) -> None:
    whole = backend.tokenize([Span("<|user|>the word", special=True)], add_special=True)
    spans = [Span("<|user|>the w", special=True), Span("or", special=False), Span("d", special=True)]
    assert backend.tokenize(spans, add_special=True) == whole


@given(
    st.lists(st.tuples(st.text("<|user>ab ", max_size=12) | st.sampled_from(CONTROL_TEXTS), st.booleans()), max_size=5)
)
def test_literal_spans_never_hold_control_tokens(shared_backend: LlamaBackend, parts: list[tuple[str, bool]]) -> None:
    """At most the control tokens of the special spans, each alone, come out; and the text is always the same."""
    spans = [Span(text, special=special) for text, special in parts]
    tokens = shared_backend.tokenize(spans, add_special=False)
    assert shared_backend.detokenize(tokens, show_special=True) == "".join(text for text, _ in parts)
    if not any(special for _, special in parts):
        assert all(token >= len(CONTROL_TEXTS) for token in tokens)


def test_tokens_outside_the_vocabulary_are_refused(backend: LlamaBackend) -> None:
    for token in (-1, backend.facts.n_vocab):
        with pytest.raises(InvalidRequest, match=str(token)):
            backend.detokenize([token], show_special=True)


def test_a_split_character_becomes_a_replacement(backend: LlamaBackend) -> None:
    tokens = backend.tokenize([Span("漢", special=False)], add_special=False)
    assert len(tokens) == 3
    assert backend.detokenize(tokens[:2], show_special=True) == "\ufffd"


def test_end_tokens(backend: LlamaBackend) -> None:
    ends = {text for token, text in enumerate(vocabulary()) if backend.is_end(token)}
    assert EOS_TEXT in ends
    assert "<|user|>" not in ends


def test_glm_turns_end_where_the_next_role_begins(backend: LlamaBackend) -> None:
    glm = Vocabulary(load_bindings(), backend._vocabulary.handle, "glm4moe")
    ends = {vocabulary()[token] for token in glm.end_tokens}
    assert ends >= {EOS_TEXT, "<|user|>", "<|observation|>"}
    assert "<|assistant|>" not in ends


def test_the_vocabulary_answers_while_a_decode_runs(backend: LlamaBackend) -> None:
    expected = backend.tokenize([Span("this is the word", special=False)], add_special=False)
    stop = threading.Event()
    wrong: list[list[int]] = []

    def ask() -> None:
        while not stop.is_set():
            tokens = backend.tokenize([Span("this is the word", special=False)], add_special=False)
            if tokens != expected or backend.detokenize(tokens, show_special=False) != "this is the word":
                wrong.append(tokens)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        backend.keep(0, 0)
        assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


# ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_logits_do_not_depend_on_the_cut_of_the_prompt(backend: LlamaBackend) -> None:
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    whole = logits(backend, len(LETTERS) - 1)
    assert backend.decode([Piece(1, 0, LETTERS[:25], Logits.NONE)]) is DecodeStatus.OK
    rows = [Piece(2, 0, LETTERS[:5], Logits.LAST), Piece(1, 25, LETTERS[25:], Logits.LAST)]
    assert backend.decode(rows) is DecodeStatus.OK
    assert np.abs(logits(backend, 5 + len(LETTERS) - 25 - 1) - whole).max() < 1e-4


def test_all_rows_give_logits_where_asked(backend: LlamaBackend) -> None:
    assert backend.decode([Piece(0, 0, LETTERS[:4], Logits.ALL)]) is DecodeStatus.OK
    together = [logits(backend, row) for row in range(4)]
    backend.keep(0, 0)
    for position in range(4):
        assert read(backend, 0, position, [LETTERS[position]]) is DecodeStatus.OK
        assert np.abs(logits(backend, 0) - together[position]).max() < 1e-4


def test_batches_that_would_abort_the_process_are_refused(backend: LlamaBackend) -> None:
    with pytest.raises(ValueError, match="a batch of 129 tokens"):
        read(backend, 0, 0, [LETTERS[0]] * 129)
    with pytest.raises(ValueError, match="a batch of 0 tokens"):
        backend.decode([])
    with pytest.raises(ValueError, match="5 rows of logits"):
        backend.decode([Piece(0, 0, LETTERS[:5], Logits.ALL)])


def test_an_invalid_token_fails_and_stores_nothing(backend: LlamaBackend) -> None:
    assert read(backend, 0, 0, [LETTERS[0], 100_000]) is DecodeStatus.FAILED
    assert backend.length(0) == 0


def test_a_full_cache_stores_nothing(model: Path) -> None:
    backend = load(model, n_ctx=256, n_slots=2)
    assert [read(backend, 0, start, LETTERS[:50]) for start in range(0, 200, 50)] == [DecodeStatus.OK] * 4
    assert read(backend, 1, 0, [*LETTERS[:57]]) is DecodeStatus.NO_ROOM
    assert (backend.length(0), backend.length(1)) == (200, 0)
    assert read(backend, 1, 0, LETTERS[:56]) is DecodeStatus.OK
    backend.close()


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────────


def continuation(backend: LlamaBackend, sequence: int, n_held: int, tokens: list[int]) -> list[int]:
    """Greedy tokens after `tokens` are put behind the `n_held` that the sequence has."""
    sampler = backend.sampler(Job(0, tokens, SamplingOptions(temperature=0.0)))
    made: list[int] = []
    piece = tokens
    for _ in range(12):
        assert read(backend, sequence, n_held, piece) is DecodeStatus.OK
        n_held += len(piece)
        piece = [sampler.sample(len(piece) - 1)]
        made += piece
    sampler.close()
    return made


@pytest.mark.parametrize("unified", [True, False])
def test_keep_and_copy_go_on_like_a_fresh_sequence(model: Path, unified: bool) -> None:
    backend = load(model, kv_unified=unified)
    expected = continuation(backend, 0, 0, LETTERS)
    assert backend.length(0) == len(LETTERS) + 11

    assert backend.keep(0, 40)
    assert backend.length(0) == 40
    assert continuation(backend, 0, 40, LETTERS[40:]) == expected

    assert read(backend, 1, 0, LETTERS[5:25]) is DecodeStatus.OK  # what the copy must clear first
    assert backend.copy(0, 1, 50)
    assert (backend.length(0), backend.length(1)) == (len(LETTERS) + 11, 50)
    assert continuation(backend, 1, 50, LETTERS[50:]) == expected

    assert backend.keep(0, 0)
    assert (backend.length(0), backend.length(1)) == (0, len(LETTERS) + 11)
    assert backend.keep(1, len(LETTERS))
    assert backend.copy(1, 2, 0)
    assert backend.length(2) == 0
    backend.close()


def test_what_the_cache_does_not_hold_cannot_be_copied(backend: LlamaBackend) -> None:
    assert read(backend, 0, 0, LETTERS[:10]) is DecodeStatus.OK
    assert read(backend, 1, 0, LETTERS[:3]) is DecodeStatus.OK
    assert not backend.copy(0, 1, 11)
    assert not backend.copy(0, 0, 5)
    assert (backend.length(0), backend.length(1)) == (10, 3)
    assert backend.keep(0, 99)
    assert backend.length(0) == 10


@pytest.mark.parametrize("unified", [True, False])
def test_a_recurrent_state_cannot_be_cut(tmp_path: Path, unified: bool) -> None:
    backend = load(write_recurrent_gguf(tmp_path / "recurrent.gguf"), kv_unified=unified)
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    assert not backend.keep(0, 30)
    assert not backend.copy(0, 1, 30)
    assert (backend.length(0), backend.length(1)) == (len(LETTERS), 0)
    assert backend.keep(0, len(LETTERS))
    assert backend.copy(0, 1, len(LETTERS))
    assert continuation(backend, 1, len(LETTERS), LETTERS[:1]) == continuation(backend, 0, len(LETTERS), LETTERS[:1])
    assert backend.keep(0, 0)
    assert backend.length(0) == 0
    backend.close()


def test_a_sliding_window_goes_back_only_as_far_as_it_reaches(tmp_path: Path) -> None:
    backend = load(write_sliding_window_gguf(tmp_path / "window.gguf"), n_slots=2)
    n_read = 10 * len(LETTERS)
    for start in range(0, n_read, len(LETTERS)):
        assert read(backend, 0, start, LETTERS) is DecodeStatus.OK
    assert not backend.keep(0, WINDOW)
    assert not backend.copy(0, 1, WINDOW)
    assert backend.length(0) == n_read
    assert backend.copy(0, 1, n_read - 1)
    assert backend.keep(0, n_read - 1)
    assert backend.length(0) == backend.length(1) == n_read - 1
    backend.close()


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("unified", [True, False])
def test_a_state_comes_back_to_the_bit(model: Path, unified: bool, cache_type: str) -> None:
    flash = "off" if cache_type == "f16" else "on"
    backend = load(model, kv_unified=unified, cache_type_k=cache_type, cache_type_v=cache_type, flash_attn=flash)
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    state = backend.save(0, 0, 1 << 30)
    assert state is not None
    assert read(backend, 0, len(LETTERS), [300]) is DecodeStatus.OK
    expected = logits(backend, 0)
    assert read(backend, 1, 0, LETTERS[::-1]) is DecodeStatus.OK  # another place in the cache
    for end in (len(LETTERS), 41):
        backend.keep(2, 0)
        assert backend.restore(2, state, 0, end)
        assert backend.length(2) == end
        if end < len(LETTERS):
            assert read(backend, 2, end, LETTERS[end:]) is DecodeStatus.OK
        assert read(backend, 2, len(LETTERS), [300]) is DecodeStatus.OK
        assert np.array_equal(logits(backend, 0), expected)
    backend.close()


def test_a_tail_joins_a_prefix_that_is_shared(backend: LlamaBackend) -> None:
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    whole, tail = backend.save(0, 0, 1 << 30), backend.save(0, 40, 1 << 30)
    assert whole is not None
    assert tail is not None
    assert tail.nbytes < whole.nbytes / 2
    assert read(backend, 0, len(LETTERS), [300]) is DecodeStatus.OK
    expected = logits(backend, 0)
    assert backend.copy(0, 1, 45)
    assert backend.restore(1, tail, 45, len(LETTERS))
    assert read(backend, 1, len(LETTERS), [300]) is DecodeStatus.OK
    np.testing.assert_allclose(logits(backend, 0), expected, atol=1e-5)
    assert not backend.restore(2, tail, 0, 99)
    assert backend.length(2) == 0


def test_a_state_that_is_too_large_is_not_copied(backend: LlamaBackend) -> None:
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    state = backend.save(0, 0, 1 << 30)
    assert state is not None
    assert backend.save(0, 0, state.nbytes - 1) is None
    assert backend.save(3, 0, 1 << 30) is None or backend.length(3) == 0


def test_a_damaged_state_is_refused_and_leaves_nothing(backend: LlamaBackend) -> None:
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    state = backend.save(0, 0, 1 << 30)
    assert state is not None
    assert not backend.restore(1, state[:-9].copy(), 0, len(LETTERS))
    assert not backend.restore(1, np.zeros(200, dtype=np.uint8), 0, len(LETTERS))
    assert backend.length(1) == 0
    assert backend.restore(1, state, 0, len(LETTERS))


@pytest.mark.parametrize("write", [write_recurrent_gguf, write_sliding_window_gguf])
def test_states_that_cannot_be_cut_come_back_whole(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    backend = load(write(tmp_path / "model.gguf"), n_slots=2)
    assert not backend.facts.can_cut
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    state = backend.save(0, 0, 1 << 30)
    assert state is not None
    expected = continuation(backend, 0, len(LETTERS), LETTERS[:1])
    assert backend.restore(1, state, 0, len(LETTERS))
    assert continuation(backend, 1, len(LETTERS), LETTERS[:1]) == expected
    backend.close()


def test_a_stream_that_is_still_being_copied_is_not_saved(model: Path) -> None:
    backend = load(model, kv_unified=False)
    assert read(backend, 0, 0, LETTERS) is DecodeStatus.OK
    assert backend.copy(0, 1, 40)
    assert [backend.is_settled(sequence) for sequence in range(3)] == [False, False, True]
    assert backend.save(1, 0, 1 << 30) is None
    assert read(backend, 1, 40, LETTERS[40:]) is DecodeStatus.OK
    assert backend.is_settled(0)
    assert backend.save(1, 0, 1 << 30) is not None
    backend.close()


# ── warm-up ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"n_ctx": 256}, {"kv_unified": False}, {"n_slots": 1}, {"n_batch": 4}])
def test_warm_up_leaves_the_memory_empty(model: Path, options: dict[str, object]) -> None:
    backend = load(model, **({"n_ubatch": 512} | options))
    backend.warm_up()
    assert [backend.length(sequence) for sequence in range(backend.facts.n_slots)] == [0] * backend.facts.n_slots
    assert read(backend, 0, 0, LETTERS[:4]) is DecodeStatus.OK
    backend.close()


def test_a_warm_up_that_fails_gives_advice(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load(model, n_ctx=256)
    monkeypatch.setattr(backend, "_decode", lambda context, batch: -3)
    with pytest.raises(LoadError, match=r"warm-up batch of 4 tokens failed .* use a smaller --ubatch-size, --ctx-size"):
        backend.warm_up()
    backend.close()
