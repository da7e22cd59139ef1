"""The command as a whole: exit codes, one line on stderr, and the hand-over to the app."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from server.cli import main
from server.config import Config
from server.errors import LoadError, PortError


class FakeApp(ModuleType):
    """Stands where server.app is, so that nothing starts."""

    def __init__(self, result: int | BaseException = 0) -> None:
        super().__init__("server.app")
        self.result = result
        self.configs: list[Config] = []

    def run(self, config: Config) -> int:
        self.configs.append(config)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def list_devices(self, rpc_servers: tuple[str, ...]) -> int:
        return 0


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FakeApp:
    fake = FakeApp()
    monkeypatch.setitem(sys.modules, "server.app", fake)
    return fake


def test_a_config_is_handed_to_the_app(app: FakeApp, model: Path) -> None:
    assert main(["--gguf", str(model), "--parallel", "2"]) == 0
    (config,) = app.configs
    assert config.engine.model.n_slots == 2


def test_the_apps_exit_code_is_the_commands(app: FakeApp, model: Path) -> None:
    app.result = 7
    assert main(["--gguf", str(model)]) == 7


@pytest.mark.parametrize(
    ("error", "code"), [(LoadError("no room"), 4), (PortError("port 80 is taken; give another --port"), 5)]
)
def test_start_errors_of_the_app_are_one_line(
    app: FakeApp, model: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    app.result = error
    assert main(["--gguf", str(model)]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no model is given"),
        (["--ctx-sizes", "1"], 2, "did you mean --ctx-size"),
        (["-c", "x"], 2, "-c is 'x'"),
        (["-hf", "a"], 2, "-hf is 'a', but must be OWNER/REPO"),
        (["--hf-file", "m.gguf"], 2, "--hf-file needs --hf-repo"),
        (["-hf", "a/b", "--gguf", "m"], 2, "exclude each other"),
        (["--gguf", "a/b:Q4_K_M", "--offline"], 6, "forbids fetching it"),
        (["--gguf", "glm-5.9"], 2, "did you mean glm-5"),
        (["--config", "/nowhere.toml", "--demo"], 2, "/nowhere.toml"),
        (["--gguf", "/nowhere.gguf"], 3, "there is no file"),
        (["--gguf", "/dev/null"], 3, "neither a file nor a folder"),
    ],
)
def test_mistakes_are_one_line_and_a_code(
    app: FakeApp, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert app.configs == []


def test_an_early_interrupt_is_no_traceback(app: FakeApp, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app.result = KeyboardInterrupt()
    assert main(["--gguf", str(model)]) == 130
    assert capsys.readouterr().err == ""


def test_devices_are_listed_by_the_app(app: FakeApp) -> None:
    assert main(["--list-devices"]) == 0
    assert app.configs == []


def test_printing_needs_no_model(app: FakeApp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--gguf", "/nowhere.gguf", "--prio", "1"]) == 0
    captured = capsys.readouterr()
    assert 'gguf = "/nowhere.gguf"' in captured.out
    assert captured.err.startswith("warning: --prio has no effect here")


def test_the_process_environment_is_read(app: FakeApp, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", str(model))
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "3")
    monkeypatch.setattr(sys, "argv", ["server"])
    assert main() == 0
    assert app.configs[0].engine.model.n_slots == 3
