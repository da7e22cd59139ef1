"""What the command line says about itself, and what that costs."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server import __version__
from server.cli.build import build_config
from server.cli.flags import GROUPS, all_flags
from server.cli.help import WIDTH, config_text, help_text, toml, version_text
from server.cli.settings import Settings
from server.config import Config
from tests.cli.reading import settings_of
from tests.cli.test_build import TABLE

HEAVY = ("fastapi", "starlette", "uvicorn", "pydantic", "numpy", "llama_cpp", "jinja2", "rich", "asyncio")


def test_the_short_help_is_short() -> None:
    lines = help_text(everything=False).splitlines()
    assert len(lines) <= 96
    assert max(map(len, lines)) <= WIDTH
    assert all(f"{group.title}:" in lines for group in GROUPS)


def test_the_long_help_has_every_flag_on_one_line() -> None:
    lines = help_text(everything=True).splitlines()
    assert max(map(len, lines)) <= WIDTH
    for flag in all_flags():
        assert sum(f"--{flag.key}" in line.split()[:2] for line in lines) == 1, flag.key
    assert lines[-1]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "server"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--help-all"], 0),
        (["--version"], 0),
        (["--print-config"], 0),
        (["--port", "x"], 2),
        (["--gguf", "/nowhere/x.gguf"], 3),
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str], code: int) -> None:
    program = (
        "import sys\nfrom server.cli import main\n"
        f"code = main({arguments!r})\n"
        f"assert code == {code}, code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    result = run(code=program)
    assert result.returncode == 0, result.stderr


def test_help_answers_at_once() -> None:
    """Processor time, which other work on the machine does not lengthen; alone it is what a person waits."""
    times = []
    for _ in range(5):
        before = cpu_seconds()
        result = run("--help")
        times.append(cpu_seconds() - before)
        assert result.returncode == 0
        assert result.stderr == ""
    assert min(times) < 0.3


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_beats_every_mistake() -> None:
    result = run("--no-such-flag", "-h")
    assert result.returncode == 0
    assert result.stdout == help_text(everything=False)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m server --print-config | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""


def test_the_version_names_the_binding() -> None:
    assert version_text().startswith(f"glmserve {__version__} (llama-cpp-python ")
    assert run("--version").stdout == version_text()


# ── --print-config ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_value_is_shown_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "glm.toml"
    file.write_text("port = 81\n")
    text = config_text(settings_of("-c", "4096", env={"LLAMA_ARG_BATCH": "256"}, file=str(file)))
    lines = {line.split(" =")[0].lstrip("# "): line for line in text.splitlines()}
    assert {flag.key for flag in all_flags() if not flag.action} - lines.keys() == {"mlock", "mmap", "direct-io"}
    for key, value, where in (
        ("ctx-size", "4096", "-c"),
        ("batch-size", "256", "LLAMA_ARG_BATCH"),
        ("port", "81", f"port in {file}"),
        ("parallel", "4", "auto"),
        ("kv-unified", "true", "on, because --parallel is auto"),
        ("ubatch-size", "256", "as --batch-size"),
        ("top-k", "40", "default"),
    ):
        assert lines[key].replace(" ", "") == f"{key}={value}#{where}".replace(" ", "")
    assert lines["device"].endswith("# unset")


def test_secrets_are_masked() -> None:
    text = config_text(settings_of("--api-key", "sesame,open"))
    assert "sesame" not in text
    assert "(hidden: 2 keys)" in text


def same_apart_from_origins(one: Settings, other: Settings) -> None:
    for setting in one:
        if not setting.flag.action:
            assert setting.value == other[setting.flag.key], setting.flag.key


def _nothing_pinned(config: Config) -> Config:
    """In a printed configuration every size is set by hand, so that --fit changes none of them."""
    fit = msgspec.structs.replace(config.engine.fit, given=())
    return dataclasses.replace(config, engine=msgspec.structs.replace(config.engine, fit=fit))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.lists(st.sampled_from(TABLE), max_size=8, unique_by=lambda row: row[0][0]))
def test_a_printed_config_reads_back_as_itself(
    tmp_path: Path, model: Path, choice: list[tuple[list[str], str, object]]
) -> None:
    together = {"--rope-scale", "--rope-freq-scale"}, {"--flash-attn", "--cache-type-v"}, {"--api-key"}
    names = {row[0][0] for row in choice}
    arguments = [each for row in choice for each in row[0]]
    if any(pair <= names for pair in together):
        arguments = []
    first = settings_of("--gguf", str(model), *arguments)
    printed = tmp_path / "printed.toml"
    printed.write_text(config_text(first), encoding="utf-8")
    second = settings_of(file=str(printed))
    same_apart_from_origins(first, second)
    one, other = (_nothing_pinned(build_config(each)) for each in (first, second))
    assert (one.engine, one.http, one.chat, one.log) == (other.engine, other.http, other.chat, other.log)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_become_toml(text: str) -> None:
    import tomllib

    assert tomllib.loads(f"key = {toml(text)}") == {"key": text}


def test_a_python_without_the_packages_is_told_so_in_one_sentence() -> None:
    command = [sys.executable, "-S", "-m", "server", "plan", "nothing"]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: the package '")
    assert "make install" in result.stderr
    assert "Traceback" not in result.stderr
