"""The container's files agree with each other, with the scripts and with the command line that they use."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from server.cli.command import read_settings

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile.cuda").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()


def copied() -> list[str]:
    """What the Dockerfile copies from the project."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied():
        assert list(ROOT.glob(source)), source
        assert any(source == entry or fnmatch.fnmatch(source, entry) for entry in allowed), source
    assert set(allowed) == set(copied())  # and nothing more goes to the builder


def test_no_model_goes_into_the_image() -> None:
    files = [file for source in copied() for file in ROOT.glob(source)]
    assert [file for file in files if file.is_dir()] == [ROOT / "server"]
    assert [file for file in files if file.suffix == ".gguf"] == []
    assert list((ROOT / "server").rglob("*.gguf")) == []


def test_the_image_runs_the_server_as_nobody_in_particular_and_stops_it_by_sigterm() -> None:
    last = DOCKERFILE.rsplit("\nFROM ", 1)[1]
    assert re.search(r"^USER (?!0|root)\d+:\d+$", last, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", last, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["python", "-m", "server"\]$', last, re.MULTILINE)
    assert "/health" in last.split("HEALTHCHECK")[1]


def test_variables_of_the_image_are_the_servers_own() -> None:
    environment = dict(re.findall(r"\b(LLAMA_ARG_\w+)=(\S+)", DOCKERFILE))
    settings = read_settings([], environment)
    assert (settings["host"], settings["port"]) == (("0.0.0.0",), 8080)
    assert settings.warnings == []


def test_build_arguments_of_compose_are_the_dockerfiles() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert {"CUDA_ARCHITECTURES", "DEVEL", "RUNTIME"} <= arguments
    block = COMPOSE.split("args:\n")[1].split("    #")[0]
    assert set(re.findall(r"^ +(\w+):", block, re.MULTILINE)) <= arguments


def shown_commands() -> list[str]:
    """The arguments of the image in compose.yaml and in the documents, with variables at their defaults."""
    (line,) = re.findall(r"^ +command: (.+)$", COMPOSE, re.MULTILINE)
    lines = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line)]
    page = (ROOT / "docs" / "operations.md").read_text().replace("\\\n", " ")
    for name in ("glmserve:cuda", r"llama\.cpp:server-cuda"):
        lines += re.findall(rf"^docker run .*{name} +(-.+)$", page, re.MULTILINE)
    return lines


@pytest.mark.parametrize("line", shown_commands())
def test_command_lines_that_are_shown_are_taken_without_a_warning(line: str) -> None:
    settings = read_settings(shlex.split(line), {})
    assert settings["gguf"]
    assert settings.warnings == []


def test_the_line_for_llama_cpps_image_is_taken_word_for_word() -> None:
    lines = [line for line in shown_commands() if "--metrics" in line]
    assert len(lines) == 2
    assert lines[0].split() == lines[1].split()
