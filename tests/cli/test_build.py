"""From flags to the rooms' options: where each value lands, what is read from files, what the model forbids."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from server.api.options import ApiKey, CorsOptions, HttpOptions, ModelNames, TlsOptions
from server.chat.options import ReasoningFormat
from server.cli.build import build_config
from server.cli.flags import all_flags
from server.config import Config
from server.engine.options import TensorOverride
from server.errors import ConfigError, ModelFileError
from server.ops.options import LogFormat, LogLevel
from tests.cli.reading import config_of, settings_of
from tests.support import gguf_bytes as raw
from tests.support.gguf_bytes import Gguf

MODEL, SCHEDULER, SAMPLING = "engine.model", "engine.scheduler", "http.generation.sampling"

# Arguments, the option they must reach, the value there. Every flag of the table is here (see the test below).
TABLE: list[tuple[list[str], str, Any]] = [
    (["--alias", "b,a"], "http.model_names", ("b", "a")),
    (["--tags", "x,y"], "http.model_tags", ("x", "y")),
    (["--load-mode", "dio"], f"{MODEL}.load_mode", "dio"),
    (["--check-tensors"], f"{MODEL}.check_tensors", True),
    (["--no-warmup"], f"{MODEL}.warmup", False),
    (["--rope-scaling", "yarn"], f"{MODEL}.rope_scaling", "yarn"),
    (["--rope-scale", "4"], f"{MODEL}.rope_freq_scale", 0.25),
    (["--rope-freq-base", "10000"], f"{MODEL}.rope_freq_base", 10000.0),
    (["--rope-freq-scale", "0.5"], f"{MODEL}.rope_freq_scale", 0.5),
    (["--ctx-size", "8192"], f"{MODEL}.n_ctx", 8192),
    (["--parallel", "7"], f"{MODEL}.n_slots", 7),
    (["--no-kv-unified"], f"{MODEL}.kv_unified", False),
    (["--kv-unified-per-slot", "512"], f"{MODEL}.n_ctx_slot_max", 512),
    (["--batch-size", "1024"], f"{MODEL}.n_batch", 1024),
    (["--ubatch-size", "128"], f"{MODEL}.n_ubatch", 128),
    (["--cache-type-k", "q8_0"], f"{MODEL}.cache_type_k", "q8_0"),
    (["--cache-type-v", "q8_0"], f"{MODEL}.cache_type_v", "q8_0"),
    (["--flash-attn", "off"], f"{MODEL}.flash_attn", "off"),
    (["--no-cont-batching"], f"{SCHEDULER}.cont_batching", False),
    (["--slot-prompt-similarity", "0.5"], f"{SCHEDULER}.slot_prompt_similarity", 0.5),
    (["--cache-ram", "2"], f"{SCHEDULER}.cache_ram_bytes", 2 << 20),
    (["--cache-disk", "/tmp"], "engine.disk.cache_folder", "/tmp"),
    (["--cache-disk-limit", "1.5"], "engine.disk.cache_limit_bytes", 3 << 29),
    (["--slot-save-path", "/tmp"], "engine.disk.slot_folder", "/tmp"),
    (["--slot-save-path", "/tmp"], "http.slot_actions", True),
    (["--cache-ram", "-1"], f"{SCHEDULER}.cache_ram_bytes", sys.maxsize),
    (["--no-cache-idle-slots"], f"{SCHEDULER}.cache_idle_slots", False),
    (["--no-cache-prompt"], "http.generation.cache_prompt", False),
    (["--max-stall-ms", "100"], f"{SCHEDULER}.max_stall_ms", 100.0),
    (["--n-gpu-layers", "all"], f"{MODEL}.n_gpu_layers", -1),
    (["--split-mode", "none"], f"{MODEL}.split_mode", "none"),
    (["--tensor-split", "3,1"], f"{MODEL}.tensor_split", (3.0, 1.0)),
    (["--main-gpu", "2"], f"{MODEL}.main_gpu", 2),
    (["--device", "CUDA0,CUDA1"], f"{MODEL}.devices", ("CUDA0", "CUDA1")),
    (["--override-tensor", "exps=CPU"], f"{MODEL}.tensor_overrides", (TensorOverride("exps", "CPU"),)),
    (["--cpu-moe"], f"{MODEL}.cpu_moe", True),
    (["--n-cpu-moe", "3"], f"{MODEL}.n_cpu_moe", 3),
    (["--pipeline", "off"], f"{MODEL}.pipeline", False),
    (["--fit", "off"], "engine.fit.adapts", False),
    (["--fit-ctx", "8192"], "engine.fit.least_ctx", 8192),
    (["--fit-target", "512,2048"], "engine.fit.margin_bytes", (512 << 20, 2048 << 20)),
    (["--n-cpu-ffn", "1"], f"{MODEL}.tensor_overrides", (TensorOverride(r"blk\.0\.ffn_(up|down|gate)\.", "CPU"),)),
    (["--no-kv-offload"], f"{MODEL}.offload_kqv", False),
    (["--no-op-offload"], f"{MODEL}.op_offload", False),
    (["--no-host"], f"{MODEL}.no_host", True),
    (["--no-repack"], f"{MODEL}.use_extra_bufts", False),
    (["--threads", "3"], f"{MODEL}.n_threads", 3),
    (["--threads-batch", "5"], f"{MODEL}.n_threads_batch", 5),
    (["--numa", "isolate"], f"{MODEL}.numa", "isolate"),
    (["--rpc", "a:1,b:2"], f"{MODEL}.rpc_servers", ("a:1", "b:2")),
    (["--mlock"], f"{MODEL}.load_mode", "mmap+mlock"),
    (["--no-mmap"], f"{MODEL}.load_mode", "none"),
    (["--direct-io"], f"{MODEL}.load_mode", "dio"),
    (["--host", "0.0.0.0,/run/x.sock"], "http.hosts", ("0.0.0.0", "/run/x.sock")),
    (["--port", "0"], "http.port", 0),
    (["--api-key", "k1,k2"], "http.api_keys", (ApiKey("k1", "key 1"), ApiKey("k2", "key 2"))),
    (["--api-prefix", "/glm/"], "http.prefix", "/glm"),
    (["--cors-origins", "localhost"], "http.cors.origins", ("localhost",)),
    (["--cors-methods", "GET"], "http.cors.methods", ("GET",)),
    (["--cors-headers", "X-A,X-B"], "http.cors.headers", ("X-A", "X-B")),
    (["--no-cors-credentials"], "http.cors.credentials", False),
    (["--timeout", "60"], "http.timeout_s", 60.0),
    (["--sse-ping-interval", "5"], "http.ping_interval_s", 5),
    (["--max-body-mib", "0.5"], "http.max_body_bytes", 512 * 1024),
    (["--model-names", "any"], "http.unknown_model", ModelNames.ANY),
    (["--no-metrics"], "http.metrics", False),
    (["--no-slots"], "http.slots", False),
    (["--props"], "http.props", True),
    (["--log-cache-misses"], "http.log_cache_misses", True),
    (["--no-normalize-prompts"], "chat.normalize", False),
    (["--max-queue", "3"], f"{SCHEDULER}.max_waiting", 3),
    (["--queue-timeout", "7"], "http.queue_timeout_s", 7.0),
    (["--request-limit", "7200"], "http.request_limit_s", 7200.0),
    (["--shutdown-grace", "1"], "http.shutdown_grace_s", 1.0),
    (["--step-timeout", "0"], "supervisor.step_timeout_s", 0.0),
    (["--max-engine-failures", "2"], "supervisor.max_failures", 2),
    (["--chat-template", "{{ x }}"], "chat.template", "{{ x }}"),
    (["--chat-template-kwargs", '{"a": 1}'], "chat.template_kwargs", {"a": 1}),
    (["--reasoning", "off"], "chat.thinking.enabled", False),
    (["--reasoning-effort", "high"], "chat.thinking.effort", "high"),
    (["--reasoning-budget", "100"], "chat.thinking.budget", 100),
    (["--reasoning-budget-message", "So:"], "chat.thinking.budget_message", "So:"),
    (["--reasoning-preserve"], "chat.thinking.clear", False),
    (["--tool-grammar", "off"], "chat.tool_grammar", False),
    (["--reasoning-format", "none"], "chat.reasoning_format", ReasoningFormat.NONE),
    (["--predict", "100"], "http.generation.max_tokens", 100),
    (["--temp", "0.5"], f"{SAMPLING}.temperature", 0.5),
    (["--top-k", "5"], f"{SAMPLING}.top_k", 5),
    (["--top-p", "0.5"], f"{SAMPLING}.top_p", 0.5),
    (["--min-p", "0.2"], f"{SAMPLING}.min_p", 0.2),
    (["--seed", "42"], f"{SAMPLING}.seed", 42),
    (["--repeat-penalty", "1.1"], f"{SAMPLING}.repeat_penalty", 1.1),
    (["--repeat-last-n", "-1"], f"{SAMPLING}.repeat_last_n", -1),
    (["--presence-penalty", "0.1"], f"{SAMPLING}.presence_penalty", 0.1),
    (["--frequency-penalty", "-0.1"], f"{SAMPLING}.frequency_penalty", -0.1),
    (["--typical", "0.9"], f"{SAMPLING}.typical_p", 0.9),
    (["--top-nsigma", "1.5"], f"{SAMPLING}.top_n_sigma", 1.5),
    (["--xtc-probability", "0.5"], f"{SAMPLING}.xtc_probability", 0.5),
    (["--xtc-threshold", "0.2"], f"{SAMPLING}.xtc_threshold", 0.2),
    (["--dynatemp-range", "0.5"], f"{SAMPLING}.dynatemp_range", 0.5),
    (["--dynatemp-exp", "2"], f"{SAMPLING}.dynatemp_exponent", 2.0),
    (["--dry-multiplier", "0.8"], f"{SAMPLING}.dry_multiplier", 0.8),
    (["--dry-base", "2"], f"{SAMPLING}.dry_base", 2.0),
    (["--dry-allowed-length", "3"], f"{SAMPLING}.dry_allowed_length", 3),
    (["--dry-penalty-last-n", "9"], f"{SAMPLING}.dry_penalty_last_n", 9),
    (["--dry-sequence-breaker", r"\n\t\\x"], f"{SAMPLING}.dry_sequence_breakers", ("\n\t\\x",)),
    (["--dry-sequence-breaker", "none"], f"{SAMPLING}.dry_sequence_breakers", ()),
    (["--mirostat", "2"], f"{SAMPLING}.mirostat", 2),
    (["--mirostat-lr", "0.2"], f"{SAMPLING}.mirostat_eta", 0.2),
    (["--mirostat-ent", "4"], f"{SAMPLING}.mirostat_tau", 4.0),
    (["--adaptive-target", "0.5"], f"{SAMPLING}.adaptive_target", 0.5),
    (["--adaptive-decay", "0.5"], f"{SAMPLING}.adaptive_decay", 0.5),
    (["--samplers", "top_k;temp"], f"{SAMPLING}.samplers", ("top_k", "temperature")),
    (["--logit-bias", "5-1.5"], f"{SAMPLING}.logit_bias", ((5, -1.5),)),
    (["--ignore-eos"], f"{SAMPLING}.ignore_eos", True),
    (["--grammar", 'root ::= "x"'], f"{SAMPLING}.grammar", 'root ::= "x"'),
    (["--log-level", "error"], "log.level", LogLevel.ERROR),
    (["--log-level", "debug"], "engine.log_level", "info"),
    (["--log-format", "json"], "log.format", LogFormat.JSON),
    (["--log-file", "/tmp/x.log"], "log.file", "/tmp/x.log"),
]

# Flags that a test of their own covers, for they read files or say which model.
ELSEWHERE = {
    "gguf",
    "hf-repo",
    "hf-file",
    "hf-token",
    "offline",
    "models-dir",
    "demo",
    "api-key-file",
    "max-jobs-per-key",
    "ssl-key-file",
    "ssl-cert-file",
    "chat-template-file",
    "grammar-file",
}


def option(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("arguments", "path", "value"), TABLE, ids=lambda value: str(value)[:40])
def test_every_flag_reaches_its_option(model: Path, arguments: list[str], path: str, value: Any) -> None:
    assert option(config_of(model), path) != value
    assert option(config_of(model, *arguments), path) == value


def test_no_flag_is_left_out() -> None:
    by_name = {name: flag.key for flag in all_flags() for name in (*flag.names, *flag.off)}
    covered = {by_name[arguments[0]] for arguments, _, _ in TABLE} | ELSEWHERE
    assert {flag.key for flag in all_flags() if not flag.action} == covered


def test_without_flags_the_rooms_own_defaults_hold(model: Path) -> None:
    config = config_of(model)
    plain = Config(type(config.engine)(type(config.engine.model)(str(model))))
    assert config.engine == plain.engine
    assert config.supervisor == plain.supervisor
    assert config.chat == plain.chat
    assert config.log == plain.log
    assert config.warnings == ()
    assert config.http == HttpOptions(model_names=("tiny-Q4_K_M",))


def test_the_model_names_are_the_files_unless_given(model: Path) -> None:
    assert config_of(model).http.model_names == ("tiny-Q4_K_M",)
    assert config_of(model).engine.model.path == str(model)
    assert config_of(model.parent).engine.model.path == str(model)


def test_the_first_of_several_shards_is_loaded(tmp_path: Path) -> None:
    shards = raw.write_shards(tmp_path, 3)
    config = config_of(shards[2])
    assert config.engine.model.path == str(shards[0])
    assert config.http.model_names == ("big",)


def test_the_glm_demo_is_tiny_glm_and_says_nothing() -> None:
    config = build_config(settings_of("--demo", "glm"))
    assert config.engine.model.path.endswith("models/tiny-glm/tiny-glm-00001-of-00003.gguf")
    assert config.http.model_names == ("tiny-glm",)
    assert not [warning for warning in config.warnings if "--demo" in warning]


def test_the_demo_needs_no_path() -> None:
    config = build_config(settings_of("--demo"))
    assert Path(config.engine.model.path).name.startswith("SmolLM2")


def test_a_start_without_a_model_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match="add --gguf with a path, a recipe"):
        build_config(settings_of())


def test_a_wrong_model_is_a_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no file"):
        build_config(settings_of("--gguf", str(tmp_path / "x.gguf")))


def test_keys_of_flag_and_file_add_up(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# comment\n  key-a  \r\n\nkey-b\nkey-c\n#last")
    found = config_of(model, "--api-key", "key-c,z", "--api-key-file", str(keys)).http.api_keys
    assert [key.secret for key in found] == ["key-c", "z", "key-a", "key-b"]
    assert [key.name for key in found] == ["key 1", "key 2", "key 3", "key 4"]


def test_a_file_without_keys_does_not_open_the_server(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="holds no key"):
        config_of(model, "--api-key-file", str(keys))


def test_keys_are_not_in_the_configs_text(model: Path) -> None:
    assert "sesame" not in repr(config_of(model, "--api-key", "sesame"))


def test_the_folder_for_slots_must_be_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder that can be written; make it first"):
        config_of(model, "--slot-save-path", str(tmp_path / "none"))


def test_tls_files_must_open(model: Path, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    key.write_text("k")
    cert.write_text("c")
    arguments = ["--ssl-key-file", str(key), "--ssl-cert-file", str(cert)]
    assert config_of(model, *arguments).http.tls == TlsOptions(str(key), str(cert))
    cert.unlink()
    with pytest.raises(ConfigError, match=r"--ssl-cert-file names .*cert\.pem', which cannot be read: No such file"):
        config_of(model, *arguments)


def test_texts_come_from_files(model: Path, tmp_path: Path) -> None:
    template, grammar = tmp_path / "t.jinja", tmp_path / "g.gbnf"
    template.write_text("{{ größe }}", encoding="utf-8")
    grammar.write_text("root ::= [0-9]+")
    config = config_of(model, "--chat-template-file", str(template), "--grammar-file", str(grammar))
    assert config.chat.template == "{{ größe }}"
    assert config.http.generation.sampling.grammar == "root ::= [0-9]+"
    template.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        config_of(model, "--chat-template-file", str(template))
    with pytest.raises(ConfigError, match="Is a directory"):
        config_of(model, "--grammar-file", str(tmp_path))


def test_a_vllm_line(model: Path) -> None:
    config = config_of(
        model,
        *("--served-model-name", "glm-5.2,glm", "--max-model-len", "4096", "--parallel", "3"),
        *("--tool-call-parser", "glm47", "--reasoning-parser", "glm45", "--enable-auto-tool-choice"),
    )
    assert config.http.model_names == ("glm-5.2", "glm")
    assert (config.engine.model.n_ctx_slot_max, config.engine.model.n_ctx) == (4096, 3 * 4096)
    assert config.warnings == ()


@pytest.mark.parametrize("given", ["0", "-1"])
def test_threads_below_one_are_all_cores(model: Path, given: str) -> None:
    assert config_of(model, "-t", given).engine.model.n_threads == os.cpu_count()
    assert config_of(model, "-t", "auto").engine.model.n_threads == -1


def test_silence_of_streams_may_be_left_alone(model: Path) -> None:
    assert config_of(model, "--sse-ping-interval", "-1").http.ping_interval_s is None
    assert config_of(model).http.ping_interval_s == 30
    assert config_of(model).http.cors == CorsOptions()


def test_overrides_come_before_those_of_n_cpu_ffn(model: Path) -> None:
    overrides = config_of(model, "-ncffn", "2", "-ot", "a=CPU").engine.model.tensor_overrides
    assert [each.pattern for each in overrides] == [
        "a",
        r"blk\.0\.ffn_(up|down|gate)\.",
        r"blk\.1\.ffn_(up|down|gate)\.",
    ]


def test_warnings_travel_with_the_config(model: Path) -> None:
    assert config_of(model, "-sm", "row", "--prio", "2").warnings[0].startswith("--prio")


@pytest.fixture
def latent_model(tmp_path: Path) -> Path:
    pairs = [
        ("general.architecture", raw.STRING, "glm-dsa"),
        ("glm-dsa.attention.key_length_mla", raw.U32, 256),
    ]
    return Gguf(pairs=pairs).write(tmp_path / "glm.gguf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-ctk", "q8_0"], "give --cache-type-v q8_0"),
        (["-ctv", "q8_0"], "give --cache-type-k q8_0"),
        (["-ctk", "q8_0", "-ctv", "q4_0"], "give --cache-type-v q8_0"),
    ],
)
def test_one_latent_needs_one_cache_type(latent_model: Path, model: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match="glm-dsa") as caught:
        config_of(latent_model, *arguments)
    assert words in caught.value.message
    assert config_of(latent_model, "-ctk", "q8_0", "-ctv", "q8_0").engine.model.cache_type_v == "q8_0"
    assert config_of(model, *arguments).engine.model.path == str(model)


def test_tensor_split_of_a_latent_model_is_refused(latent_model: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--split-mode tensor is not possible with 'glm-dsa'.*--split-mode layer"):
        config_of(latent_model, "-sm", "tensor")
    assert config_of(model, "-sm", "tensor").engine.model.split_mode == "tensor"
