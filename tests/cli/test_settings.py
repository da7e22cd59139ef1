"""Values that depend on each other."""

from __future__ import annotations

import pytest

from tests.cli.reading import refusal, settings_of


@pytest.mark.parametrize(
    ("arguments", "slots", "unified", "n_ctx"),
    [
        ([], 4, True, 0),
        (["-np", "auto"], 4, True, 0),
        (["-np", "-1"], 4, True, 0),
        (["--no-kv-unified"], 4, False, 0),
        (["-np", "4"], 4, False, 0),
        (["-np", "8", "-kvu"], 8, True, 0),
        (["-c", "1000", "-np", "2"], 2, False, 1000),
        (["--kv-unified-per-slot", "1000"], 4, True, 4000),
        (["--kv-unified-per-slot", "1000", "-np", "3"], 3, False, 3000),
        (["--kv-unified-per-slot", "1000", "-c", "1500"], 4, True, 1500),
        (["--kv-unified-per-slot", "1000", "-c", "0"], 4, True, 0),
    ],
)
def test_slots_and_cache(arguments: list[str], slots: int, unified: bool, n_ctx: int) -> None:
    settings = settings_of(*arguments)
    assert (settings["parallel"], settings["kv-unified"], settings["ctx-size"]) == (slots, unified, n_ctx)
    assert settings.warnings == []


def test_the_disk_is_behind_host_memory() -> None:
    assert "--cache-ram a size" in refusal("--cache-disk", "/tmp", "--cache-ram", "0")
    assert settings_of("--cache-disk", "/tmp").warnings == []
    (warning,) = settings_of("--cache-disk-limit", "5").warnings
    assert warning == "--cache-disk-limit has no effect without --cache-disk DIR"


@pytest.mark.parametrize(
    ("arguments", "mode", "words"),
    [
        (["--mlock"], "mmap+mlock", "--mlock is an old name: it counts as --load-mode mmap+mlock"),
        (["--no-mmap"], "none", "--no-mmap is an old name: it counts as --load-mode none"),
        (["--mmap"], "mmap", "--mmap is an old name"),
        (["--mlock", "--no-mmap"], "mlock", "--mlock and --no-mmap are old names"),
        (["--direct-io"], "dio", "--direct-io is an old name"),
        (["-ndio"], "auto", "-ndio is an old name"),
        (["--mlock", "-lm", "none"], "none", "does not count beside -lm"),
    ],
)
def test_old_names_of_the_load_mode(arguments: list[str], mode: str, words: str) -> None:
    settings = settings_of(*arguments)
    assert settings["load-mode"] == mode
    (warning,) = settings.warnings
    assert words in warning


def test_old_load_names_obey_the_order_of_places() -> None:
    env = {"LLAMA_ARG_LOAD_MODE": "none"}
    assert settings_of("--mlock", env=env)["load-mode"] == "mmap+mlock"
    assert settings_of("-lm", "dio", env={"LLAMA_ARG_MLOCK": "1"})["load-mode"] == "dio"
    assert settings_of(env={"LLAMA_ARG_NO_MMAP": "1"})["load-mode"] == "none"


def test_row_becomes_layer_with_a_warning() -> None:
    settings = settings_of("-sm", "row")
    assert settings["split-mode"] == "layer"
    (warning,) = settings.warnings
    assert "-sm row is served as layer" in warning
    assert settings_of("-sm", "tensor")["split-mode"] == "tensor"


def test_main_gpu_without_effect_is_told() -> None:
    assert "no effect with --split-mode layer" in settings_of("-mg", "1").warnings[0]
    assert settings_of("-mg", "1", "-sm", "none").warnings == []


def test_the_small_batch_is_never_larger_than_the_large() -> None:
    settings = settings_of("-b", "128")
    assert settings["ubatch-size"] == 128
    assert settings.warnings == []
    assert refusal("-b", "128", "-ub", "256") == "-ub is 256, more than -b 128; lower the first or raise the second"


def test_the_large_batch_follows_a_larger_small_one() -> None:
    settings = settings_of("-ub", "8192")
    assert (settings["batch-size"], settings["ubatch-size"]) == (8192, 8192)
    assert settings.warnings == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--gguf", "x"], ["--demo"]),
        (["--chat-template", "x"], ["--chat-template-file", "y"]),
        (["--grammar", "x"], ["--grammar-file", "y"]),
        (["--rope-scale", "2"], ["--rope-freq-scale", "0.5"]),
    ],
)
def test_pairs_that_exclude_each_other(one: list[str], other: list[str]) -> None:
    message = refusal(*one, *other)
    assert message == f"{one[0]} and {other[0]} exclude each other; keep one of them"


def test_of_an_excluding_pair_the_higher_place_wins() -> None:
    settings = settings_of("--demo", env={"LLAMA_ARG_MODEL": "x.gguf"})
    assert settings["demo"] == "small"
    assert settings["gguf"] is None
    settings = settings_of("-m", "y.gguf", env={"GLMSERVE_DEMO": "1"})
    assert settings["demo"] is None
    assert settings["gguf"] == "y.gguf"


@pytest.mark.parametrize(("present", "absent"), [("key", "cert"), ("cert", "key")])
def test_tls_needs_both_files(present: str, absent: str) -> None:
    assert f"without --ssl-{absent}-file" in refusal(f"--ssl-{present}-file", "x")


def test_none_beside_devices_is_refused() -> None:
    assert "names 'none' beside" in refusal("-dev", "none,CUDA0")
    assert settings_of("-dev", "none")["device"] == ("none",)


def test_sampling_values_that_mean_another() -> None:
    assert settings_of("--temp", "-1")["temp"] == 0.0
    assert settings_of("--seed", "4294967295")["seed"] == -1
    assert "--samplers" in settings_of("--mirostat", "2", "--samplers", "top_k").warnings[0]
