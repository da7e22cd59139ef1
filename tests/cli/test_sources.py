"""Environment and file, and which of the four places wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.cli.given import Collector, Rank
from server.cli.names import Names
from server.cli.sources import read_environment
from tests.cli.reading import refusal, settings_of


def toml(folder: Path, text: str) -> str:
    path = folder / "glm.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "ctx-size = 3\nbatch-size = 30\nport = 300\n")
    env = {"LLAMA_ARG_CTX_SIZE": "2", "LLAMA_ARG_BATCH": "20"}
    settings = settings_of("-c", "1", env=env, file=file)
    assert [settings[key] for key in ("ctx-size", "batch-size", "port", "ubatch-size")] == [1, 20, 300, 20]
    assert [settings.setting(key).rank for key in ("ctx-size", "batch-size", "port", "ubatch-size")] == [
        Rank.FLAG,
        Rank.ENVIRONMENT,
        Rank.FILE,
        Rank.DEFAULT,
    ]
    assert settings.setting("ctx-size").where == "-c"
    assert settings.setting("batch-size").where == "LLAMA_ARG_BATCH"
    assert settings.setting("port").where == f"port in {file}"


def test_a_list_is_taken_from_one_place(tmp_path: Path) -> None:
    file = toml(tmp_path, 'api-key = ["c", "d"]\n')
    assert settings_of(file=file)["api-key"] == ("c", "d")
    assert settings_of(file=file, env={"LLAMA_API_KEY": "b"})["api-key"] == ("b",)
    assert settings_of("--api-key", "a", file=file, env={"LLAMA_API_KEY": "b"})["api-key"] == ("a",)


def test_every_flag_has_a_variable_that_works() -> None:
    for flag in Names().flags.values():
        if flag.action:
            continue
        collector = Collector(Names())
        read_environment({flag.env: flag.kind.sample.strip("'")}, collector)
        (given,) = collector.given
        assert (given.flag.key, given.where, given.rank) == (flag.key, flag.env, Rank.ENVIRONMENT)
        assert collector.warnings == []


def test_actions_have_no_variable() -> None:
    env = {flag.env: "1" for flag in Names().flags.values() if flag.action and flag.key != "config"}
    collector = Collector(Names())
    read_environment(env, collector)
    assert collector.given == []


@pytest.mark.parametrize("text", ["on", "true", "1", "enabled"])
def test_true_words_of_the_environment(text: str) -> None:
    assert settings_of(env={"LLAMA_ARG_ENDPOINT_PROPS": text})["props"] is True


@pytest.mark.parametrize("text", ["off", "false", "0", "disabled"])
def test_false_words_of_the_environment(text: str) -> None:
    assert settings_of(env={"LLAMA_ARG_CONT_BATCHING": text})["cont-batching"] is False


def test_no_variables_switch_off_by_being_there() -> None:
    settings = settings_of(env={"LLAMA_ARG_NO_CONT_BATCHING": "", "LLAMA_ARG_CONT_BATCHING": "1"})
    assert settings["cont-batching"] is False
    assert settings.setting("cont-batching").where == "LLAMA_ARG_NO_CONT_BATCHING"
    assert settings_of("-cb", env={"LLAMA_ARG_NO_CONT_BATCHING": "1"})["cont-batching"] is True


def test_an_empty_variable_counts_as_unset() -> None:
    settings = settings_of(env={"LLAMA_ARG_CTX_SIZE": "", "LLAMA_API_KEY": ""})
    assert not settings.given("ctx-size")
    assert not settings.given("api-key")


def test_a_bad_variable_is_named() -> None:
    assert refusal(env={"LLAMA_ARG_CTX_SIZE": "x"}).startswith("LLAMA_ARG_CTX_SIZE is 'x'")
    assert refusal(env={"GLMSERVE_MAX_QUEUE": "-1"}).startswith("GLMSERVE_MAX_QUEUE is '-1'")
    assert refusal(env={"LLAMA_ARG_ENDPOINT_SLOTS": "maybe"}).startswith("LLAMA_ARG_ENDPOINT_SLOTS is 'maybe'")


def test_unknown_variables_are_named_in_a_warning() -> None:
    (warning,) = settings_of(env={"LLAMA_ARG_CTX_SIZ": "1", "PATH": "/bin"}).warnings
    assert "LLAMA_ARG_CTX_SIZ" in warning
    assert "did you mean LLAMA_ARG_CTX_SIZE?" in warning
    (warning,) = settings_of(env={"LLAMA_ARG_ZZZ": "1"}).warnings
    assert warning == "the variable LLAMA_ARG_ZZZ is not known and has no effect"
    (warning,) = settings_of(env={"GLMSERVE_MAX_QUEU": "1"}).warnings
    assert "GLMSERVE_MAX_QUEUE" in warning


def test_variables_of_a_cluster_are_left_alone() -> None:
    """Kubernetes sets such names for a service called glmserve."""
    env = {"GLMSERVE_PORT": "tcp://10.0.0.1:80", "GLMSERVE_SERVICE_HOST": "10.0.0.1", "HF_TOKEN": "x"}
    assert settings_of(env=env).warnings == []


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 81\n")
    assert settings_of(env={"GLMSERVE_CONFIG": file})["port"] == 81
    other = tmp_path / "other.toml"
    other.write_text("port = 82\n")
    assert settings_of(env={"GLMSERVE_CONFIG": file}, file=str(other))["port"] == 82


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("ctx_size = 5", "ctx-size", 5),
        ("n-predict = -1", "predict", -1),
        ('parallel = "auto"', "kv-unified", True),
        ("temp = 0.25", "temp", 0.25),
        ("temp = 1", "temp", 1.0),
        ("warmup = false", "warmup", False),
        ("no-warmup = true", "warmup", False),
        ("no-warmup = false", "warmup", True),
        ("flash-attn = true", "flash-attn", "on"),
        ('alias = "a,b"', "alias", ("a", "b")),
        ('alias = ["a,b", "c"]', "alias", ("a,b", "c")),
        ("tensor-split = [3, 1.5]", "tensor-split", (3.0, 1.5)),
        ('tensor-split = "3,1"', "tensor-split", (3.0, 1.0)),
        ('samplers = ["top_k", "temperature"]', "samplers", ("top_k", "temperature")),
        ('logit-bias = ["1+1", "2-inf"]', "logit-bias", ((1, 1.0), (2, float("-inf")))),
        ('override-tensor = ["a=CPU", "b=CUDA0"]', "override-tensor", (("a", "CPU"), ("b", "CUDA0"))),
        ('rpc = ["a:1", "b:2"]', "rpc", ("a:1", "b:2")),
        ("chat-template-kwargs = {a = 1, b = [true]}", "chat-template-kwargs", {"a": 1, "b": [True]}),
        ("[chat-template-kwargs]\nenable_thinking = false", "chat-template-kwargs", {"enable_thinking": False}),
        ("[http]\nport = 99", "port", 99),
        ("[a.b]\nport = 99\n[c]\nctx-size = 1", "port", 99),
        ('[gguf]\ngguf = "x"', "gguf", "x"),
        ("verbose = true", "log-level", "debug"),
        ("verbosity = 5", "log-level", "debug"),
    ],
)
def test_forms_of_keys(tmp_path: Path, text: str, key: str, value: Any) -> None:
    assert settings_of(file=toml(tmp_path, text))[key] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ctx-sizee = 1", ["unknown key ctx-sizee", "did you mean ctx-size"]),
        ("zzzz = 1", ["unknown key zzzz"]),
        ("c = 1", ["key c", "write ctx-size"]),
        ("help = true", ["key help", "only the command line"]),
        ('config = "x"', ["key config", "only the command line"]),
        ("port = 1\n[http]\nport = 2", ["sets port twice"]),
        ("predict = 1\nn-predict = 2", ["sets predict twice", "as predict and as n-predict"]),
        ('ctx-size = "x"', ["ctx-size in ", "glm.toml is 'x'", "a whole number"]),
        ("ctx-size = 1.5", ["is '1.5'"]),
        ("ctx-size = true", ["is 'true'"]),
        ("ctx-size = [1]", ["ctx-size in", "not a list"]),
        ("alias = []", ["at least one entry"]),
        ("alias = [[1]]", ["a list of texts or numbers"]),
        ("port = 2020-01-01", ["a date", "write it as a text"]),
        ("chat-template-kwargs = {d = 2020-01-01}", ["a table of texts"]),
        ('model-url = "x/y"', ["model-url in ", "--gguf"]),
        ("a = =", ["not valid TOML", "line 1"]),
        ("a = 1\na = 2", ["not valid TOML"]),
    ],
)
def test_mistakes_in_a_file_are_explained(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(file=toml(tmp_path, text))
    for word in words:
        assert word in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=str(tmp_path / "absent.toml"))
    assert "Is a directory" in refusal(file=str(tmp_path))
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refusal(file=str(binary))
