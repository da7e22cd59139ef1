"""Sub-commands: how their arguments are read, how they show themselves, and that each of the table keeps the form."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

from server.cli import commands, main
from server.cli.commands import COMMANDS, Command
from server.cli.flag import Group
from server.cli.help import WIDTH, help_text
from server.cli.reference import tables
from server.cli.subcommand import Call, Place, Spec, option, read_call, subcommand_help
from server.cli.values import Kind, Switch, Whole, Words
from server.errors import ConfigError

SPEC = Spec(
    "pack",
    "pack things",
    places=(Place("NAME", "what to pack"), Place("MORE", "further things", required=False, many=True)),
    groups=(
        Group(
            "Flags",
            (
                option("-j --jobs", Whole(least=1, metavar="N", sample="4"), 4, "at once", env="PACK_JOBS"),
                option("--json", Switch(), False, "JSON lines"),
                option("--colour", Switch(), True, "colours", off="--no-colour"),
                option("--tags", Words(sample="a,b"), None, "tags"),
                option("--key", Kind(metavar="KEY", sample="KEY"), None, "a key", secret=True),
            ),
        ),
    ),
    notes=("A note.",),
)
VERBS = Spec("box", "boxes", verbs=(SPEC, Spec("open", "open it", places=(Place("PATH", "the box"),))))


def call(*arguments: str, spec: Spec = SPEC, env: dict[str, str] | None = None) -> Call:
    return read_call(spec, arguments, env or {})


def refusal(*arguments: str, spec: Spec = SPEC) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, spec=spec)
    return caught.value.message


def test_places_and_flags_may_be_mixed() -> None:
    read = call("--jobs=2", "m", "--json", "x", "--no-colour", "--tags", "a,b", "--tags", "c", "y")
    assert (read["name"], read["more"], read["jobs"], read["json"]) == ("m", ("x", "y"), 2, True)
    assert (read["colour"], read["tags"]) == (False, ("a", "b", "c"))
    assert read.given == {"jobs", "json", "colour", "tags"}
    assert call("--", "-m")["name"] == "-m"
    assert call("m")["more"] == ()


def test_a_flag_beats_its_variable() -> None:
    assert call("m", env={"PACK_JOBS": "7"})["jobs"] == 7
    assert call("m", "-j", "3", env={"PACK_JOBS": "7"})["jobs"] == 3
    assert call("m", env={"PACK_JOBS": ""})["jobs"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "python -m server pack needs NAME: what to pack"),
        (("m", "--job", "3"), "python -m server pack has no flag --job; did you mean --jobs"),
        (("m", "--zzz"), "python -m server pack --help lists its flags"),
        (("m", "--jobs"), "--jobs needs a value: a whole number of at least 1; for example --jobs 4"),
        (("m", "--jobs", "--json"), "--jobs needs a value"),
        (("m", "--jobs", "0"), "--jobs is '0', but must be"),
        (("m", "--key="), "--key is '', but must be"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal(*arguments)


def test_too_many_arguments_are_refused() -> None:
    assert "takes PATH, and flags; 'b' is one argument too many" in refusal("open", "a", "b", spec=VERBS)


def test_verbs_are_chosen_by_the_first_argument() -> None:
    read = call("open", "a", spec=VERBS)
    assert (read.verb, read["path"]) == ("open", "a")
    assert refusal(spec=VERBS).endswith("needs to be told what to do: pack or open")
    assert refusal("opne", spec=VERBS).endswith("does not know 'opne'; did you mean open?")
    assert refusal("zzzz", spec=VERBS).endswith("; it does pack or open")


def test_flags_of_the_server_are_handed_on() -> None:
    spec = Spec(
        "plan", "plan it", groups=(Group("Flags", (option("--json", Switch(), False, "JSON"),)),), server_flags=True
    )
    read = call("--gguf", "m", "--json", "-c", "4096", spec=spec)
    assert read.rest == ("--gguf", "m", "-c", "4096")
    assert read["json"] is True


def test_help_shows_places_flags_and_verbs() -> None:
    text = subcommand_help(VERBS)
    assert "python -m server box pack|open …" in text
    assert "python -m server box pack NAME [MORE…] [flags]" in text
    assert "python -m server box open PATH" in text
    assert "-j, --jobs N" in text
    assert "A note." in text


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """A command 'pack' in the table; the calls that reached it."""
    calls: list[Call] = []
    module = ModuleType("server.cli.commands.pack")

    def run(call: Call) -> int:
        calls.append(call)
        return 7

    module.SPEC, module.run = SPEC, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in (commands, import_module("server.cli.help"), import_module("server.cli.parse")):
        monkeypatch.setattr(place, "COMMANDS", (Command("pack", "pack things"),))
    return calls


def test_the_first_argument_may_name_a_command(packed: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "m"]) == 7
    assert packed[0]["name"] == "m"
    assert main(["pack", "--help", "--zzz"]) == 0
    assert capsys.readouterr().out == subcommand_help(SPEC)
    assert main(["pack", "--zzz"]) == 2
    assert main(["pakc"]) == 2
    assert "'pakc' is no command; did you mean python -m server pack?" in capsys.readouterr().err
    assert "  pack  " in help_text(everything=False)
    assert len(packed) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_of_the_table_keeps_the_form(command: Command) -> None:
    module = command.module()
    assert isinstance(module.SPEC, Spec)
    assert module.SPEC.name == command.name
    assert callable(module.run)
    assert len(f"{'':33}{command.summary}") <= WIDTH
    assert max(map(len, subcommand_help(module.SPEC).splitlines())) <= WIDTH
    assert f"### `python -m server {command.name}" in tables()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_is_light(command: Command) -> None:
    heavy = ("fastapi", "uvicorn", "pydantic", "numpy", "llama_cpp", "jinja2", "rich", "huggingface_hub", "httpx")
    program = (
        f"import sys\nfrom server.cli import main\nassert main([{command.name!r}, '--help']) == 0\n"
        f"heavy = [name for name in {heavy!r} if name in sys.modules]\nassert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
