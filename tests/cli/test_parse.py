"""Reading the command line."""

from __future__ import annotations

import pytest

from server.cli.given import Collector
from server.cli.names import Names
from server.cli.parse import read_arguments
from tests.cli.reading import refusal, settings_of


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["-c", "8192"], "ctx-size", 8192),
        (["--ctx-size", "8192"], "ctx-size", 8192),
        (["--ctx-size=8192"], "ctx-size", 8192),
        (["--ctx_size", "8192"], "ctx-size", 8192),
        (["--ctx_size=8192"], "ctx-size", 8192),
        (["-c=8192"], "ctx-size", 8192),
        (["-n", "-1"], "predict", -1),
        (["--n-predict", "-1"], "predict", -1),
        (["--seed", "-1"], "seed", -1),
        (["--seed=-1"], "seed", -1),
        (["-ngl", "-1"], "n-gpu-layers", None),
        (["-ngl", "all"], "n-gpu-layers", -1),
        (["-ngl", "99"], "n-gpu-layers", 99),
        (["-ts", "3,1"], "tensor-split", (3.0, 1.0)),
        (["--top-nsigma", "-1.0"], "top-nsigma", -1.0),
        (["-m", "a.gguf"], "gguf", "a.gguf"),
        (["--model", "a=b.gguf"], "gguf", "a=b.gguf"),
        (["--gguf=a=b.gguf"], "gguf", "a=b.gguf"),
        (["--no-warmup"], "warmup", False),
        (["--warmup"], "warmup", True),
        (["--warmup=off"], "warmup", False),
        (["--no-warmup=off"], "warmup", True),
        (["-nocb"], "cont-batching", False),
        (["-no-kvu"], "kv-unified", False),
        (["--alias=-v"], "alias", ("-v",)),
        (["--chat-template", "--not-a-flag"], "chat-template", "--not-a-flag"),
        (["-lv", "5"], "log-level", "debug"),
        (["-v"], "log-level", "debug"),
        (["--log-jsonl"], "log-format", "json"),
        (["--log-jsonl=off"], "log-format", "text"),
        (["--log-format", "json", "--no-log-jsonl"], "log-format", "text"),
        (["--sampler-seq", "kt"], "samplers", ("top_k", "temperature")),
        (["-fa", "1"], "flash-attn", "on"),
    ],
)
def test_forms_of_flags(arguments: list[str], key: str, value: object) -> None:
    settings = settings_of(*arguments)
    assert settings[key] == value
    assert settings.given(key)


def test_every_name_of_every_flag_is_read() -> None:
    for flag in Names().flags.values():
        for name in (*flag.names, *flag.off):
            collector = Collector(Names())
            read_arguments([name, flag.kind.sample.strip("'")] if flag.kind.takes_value else [name], collector)
            (given,) = collector.given
            assert given.flag.key == flag.key
            assert given.where == name
            if not flag.kind.takes_value:
                assert given.value is (name in flag.names)


def test_no_name_has_two_meanings() -> None:
    names = Names()
    every = [name for target in names.targets for name in (*target.names, *target.off)]
    assert sorted(every) == sorted(set(every))
    variables = [target.env for target in names.targets if target.env]
    assert sorted(variables) == sorted(set(variables))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c"], ["-c needs a value", "a whole number", "for example -c 32768"]),
        (["--alias", "--port", "1"], ["--alias needs a value", "--port follows", "--alias=--port"]),
        (["--host", "--no-warmup"], ["--host needs a value", "--no-warmup follows"]),
        (["--cache-reuse"], ["--cache-reuse needs a value"]),
        (["-c", "abc"], ["-c is 'abc'", "a whole number from 0"]),
        (["-np", "0"], ["-np is '0'", "from 1 to 256", "'auto'"]),
        (["--port=99999"], ["--port is '99999'", "65535"]),
        (["-ctk", "q9_0"], ["-ctk is 'q9_0'", "q8_0", "iq4_nl"]),
        (["--split-mode", "column"], ["--split-mode is 'column'", "none, layer, row, tensor"]),
        (["--temp", "warm"], ["--temp is 'warm'", "a finite number"]),
        (["--warmup=perhaps"], ["--warmup is 'perhaps'", "on or off"]),
        (["--chat-template-kwargs", "{"], ["a JSON object", "cannot be read"]),
        (["--ctx-sizee", "4"], ["no flag --ctx-sizee", "did you mean --ctx-size"]),
        (["--ctx-siz=4"], ["no flag --ctx-siz;", "--ctx-size"]),
        (["--paralell", "4"], ["did you mean --parallel"]),
        (["--n_gpu_layer", "4"], ["--n-gpu-layers"]),
        (["--hf-rep", "x"], ["did you mean --hf-repo"]),
        (["--xyzzy-plugh"], ["no flag --xyzzy-plugh", "--help-all"]),
        (["--ctx", "4"], ["no flag --ctx"]),
        (["-q"], ["no flag -q"]),
        (["model.gguf"], ["stands alone", "--gguf model.gguf"]),
        (["serve"], ["'serve' stands alone", "--help"]),
        (["--"], ["no flag --"]),
        (["-"], ["'-' stands alone"]),
        ([""], ["'' stands alone"]),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: list[str]) -> None:
    message = refusal(*arguments)
    for word in words:
        assert word in message


def test_a_pattern_that_a_shell_has_replaced_by_shards_is_the_model() -> None:
    shards = [f"models/big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    settings = settings_of("--gguf", *shards, "--parallel", "2")
    assert settings["gguf"] == shards[0]
    assert settings["parallel"] == 2
    assert "stands alone" in refusal("--gguf", *shards, "models/other.gguf")
    assert "stands alone" in refusal("--gguf", shards[0], "elsewhere/big-00002-of-00003.gguf")
    assert "stands alone" in refusal(*shards)


def test_an_existing_path_alone_is_taken_for_the_model(tmp_path: object) -> None:
    assert f"--gguf {tmp_path}" in refusal(str(tmp_path))


def test_secrets_stay_out_of_messages() -> None:
    message = refusal("--api-key", ",")
    assert "'…'" in message
    assert "','" not in message


def test_the_last_of_several_counts_with_a_warning() -> None:
    settings = settings_of("-c", "1", "--ctx-size", "2")
    assert settings["ctx-size"] == 2
    assert settings.warnings == ["--ctx-size is given 2 times; the last one, --ctx-size, counts"]
    assert settings_of("-c", "1", "-c", "1").warnings == []


def test_lists_add_up() -> None:
    settings = settings_of(
        "--alias", "a,b", "--alias", "c", "-ot", "x=CPU", "-ot", "y=CUDA0", "-l", "1+1", "-l", "2-1",
        "--dry-sequence-breaker", "a,b", "--dry-sequence-breaker", "c", "--api-key", "k1", "--api-key", "k2",
    )  # fmt: skip
    assert settings["alias"] == ("a", "b", "c")
    assert settings["override-tensor"] == (("x", "CPU"), ("y", "CUDA0"))
    assert settings["logit-bias"] == ((1, 1.0), (2, -1.0))
    assert settings["dry-sequence-breaker"] == ("a,b", "c")
    assert settings["api-key"] == ("k1", "k2")
    assert settings.warnings == []


def test_bare_flash_attn_of_old_lines_means_on() -> None:
    settings = settings_of("-fa", "-c", "4096")
    assert settings["flash-attn"] == "on"
    assert settings["ctx-size"] == 4096
    assert settings.warnings == ["-fa without a value counts as -fa on"]
    assert settings_of("-fa")["flash-attn"] == "on"
