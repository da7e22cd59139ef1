"""Names that are not ours: every one of llama-server's is known, and none is passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.flag import Flag
from server.cli.names import Names
from server.cli.removed import FOREIGN, Answer, Foreign
from tests.cli.reading import refusal, settings_of

# One option of llama-server a line: its variable (or -) and its names; from common/arg.cpp of llama.cpp 0c1e57098.
LLAMA_NAMES = [line.split() for line in (Path(__file__).parent / "llama_server_names.txt").read_text().splitlines()]


def test_every_name_of_llama_server_is_known() -> None:
    names = Names()
    assert len(LLAMA_NAMES) > 250
    unknown = [name for _, *each in LLAMA_NAMES for name in each if names.find(name) is None]
    assert unknown == []


def test_names_of_one_option_there_are_names_of_one_target_here() -> None:
    names = Names()
    for _, *each in LLAMA_NAMES:
        targets = {id(named.target) for name in each if (named := names.find(name))}
        assert len(targets) == 1 or each[:2] == ["-e", "--escape"] or "--reasoning-preserve" in each, each


def test_variables_are_llama_servers() -> None:
    names = Names()
    for variable, *each in LLAMA_NAMES:
        named = names.find(each[0])
        assert named is not None
        if each == ["--models-dir"]:  # a folder that its router serves; here the one that models are fetched to
            assert named.target.env == "GLMSERVE_MODELS_DIR"
        elif variable != "-":
            assert named.target.env == variable, each
        elif isinstance(named.target, Flag):
            assert named.target.env.startswith(("GLMSERVE_", "HF_")), each
        else:
            assert named.target.env is None, each


def cases(answer: Answer) -> list[tuple[Foreign, str]]:
    return [(foreign, name) for foreign in FOREIGN if foreign.answer is answer for name in foreign.names]


def written(foreign: Foreign, name: str) -> list[str]:
    return [name, "17"] if foreign.takes_value else [name]


@pytest.mark.parametrize(("foreign", "name"), cases(Answer.REFUSED), ids=lambda value: str(value)[:30])
def test_refused_names_say_why(foreign: Foreign, name: str) -> None:
    assert refusal(*written(foreign, name)) == f"{name} cannot be used: {foreign.why}"
    if foreign.env:
        value = "17" if foreign.takes_value else "1"
        assert refusal(env={foreign.env: value}) == f"{foreign.env} cannot be used: {foreign.why}"


@pytest.mark.parametrize(("foreign", "name"), cases(Answer.IGNORED), ids=lambda value: str(value)[:30])
def test_ignored_names_give_one_warning(foreign: Foreign, name: str) -> None:
    assert settings_of(*written(foreign, name)).warnings == [f"{name} has no effect here: {foreign.why}"]


@pytest.mark.parametrize(("foreign", "name"), cases(Answer.SAME), ids=lambda value: str(value)[:30])
def test_names_for_what_happens_anyway_are_silent(foreign: Foreign, name: str) -> None:
    assert settings_of(*written(foreign, name)).warnings == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-context-shift"],
        ["--no-mmproj"],
        ["--no-webui"],
        ["--no-ui"],
        ["--no-perf"],
        ["--no-agent"],
        ["--embedding=false"],
        ["--spec-type", "none"],
        ["--reasoning-budget", "-1"],
        ["--sleep-idle-seconds", "-1"],
        ["--keep", "0"],
        ["--cache-reuse", "0"],
        ["-cram", "0"],
        ["-fit", "off"],
        ["--threads-http", "-1"],
        ["--pooling", "none"],
        ["--tool-call-parser", "glm45"],
        ["--reasoning-parser", "GLM45"],
    ],
)
def test_values_that_ask_for_the_servers_own_way_are_silent(arguments: list[str]) -> None:
    assert settings_of(*arguments).warnings == []


@pytest.mark.parametrize(
    ("env", "refused"),
    [
        ({"LLAMA_ARG_CONTEXT_SHIFT": "1"}, True),
        ({"LLAMA_ARG_CONTEXT_SHIFT": "0"}, False),
        ({"LLAMA_ARG_NO_CONTEXT_SHIFT": "1"}, False),
        ({"LLAMA_ARG_JINJA": "1"}, False),
        ({"LLAMA_ARG_JINJA": "0"}, True),
        ({"LLAMA_ARG_NO_JINJA": "1"}, True),
        ({"LLAMA_ARG_PREFILL_ASSISTANT": "false"}, True),
        ({"LLAMA_ARG_EMBEDDINGS": "off"}, False),
    ],
)
def test_switches_of_the_environment(env: dict[str, str], refused: bool) -> None:
    if refused:
        assert "cannot be used" in refusal(env=env)
    else:
        assert settings_of(env=env).warnings == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-mu", "http://x/m.gguf"], "give --gguf a path, OWNER/REPO:QUANT or a recipe"),
        (["--draft-max", "16"], "--spec-draft-n-max"),
        (["--draft-min", "1"], "--spec-draft-n-min"),
        (["--spec-ngram-size-n", "1"], "--spec-ngram-*"),
        (["--mmproj", "x"], "text models"),
        (["--lora", "x"], "merge them into the model"),
        (["--rerank"], "generates text"),
        (["--max-num-seqs", "8"], "--parallel"),
        (["--tool-call-parser", "hermes"], "leave it out"),
        (["--max-model-len", "auto"], "32768"),
        (["--grp-attn-n", "4"], "--rope-scaling"),
        (["--no-jinja"], "Jinja"),
        (["--context-shift"], "--ctx-size"),
    ],
)
def test_refusals_name_the_way_out(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


@pytest.mark.parametrize(
    "arguments", [["-dt", "0.1"], ["--defrag-thold", "-1"], ["-nommq"], ["--swa-full"], ["--prio", "2"]]
)
def test_removed_but_harmless_names_are_accepted(arguments: list[str]) -> None:
    settings = settings_of(*arguments)
    assert len(settings.warnings) == 1
    assert arguments[0] in settings.warnings[0]


def test_other_spellings_may_warn() -> None:
    assert settings_of("--slots-endpoint-disable")["slots"] is False
    assert "--no-slots" in settings_of("--slots-endpoint-disable").warnings[0]
    assert settings_of("--log-disable")["log-level"] == "error"
