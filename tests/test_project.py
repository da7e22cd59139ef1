"""The project keeps its own promises: versions, lock files, names, links, commands."""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import server

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
).stdout.split("\0")
FILES = [ROOT / name for name in TRACKED if name and (ROOT / name).is_file()]
LOCKS = sorted(ROOT.glob("requirements*.txt"))
PAGES = [path for path in FILES if path.suffix == ".md"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def project() -> dict[str, Any]:
    return tomllib.loads(text_of(ROOT / "pyproject.toml"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))


def requirements(lock: Path) -> dict[str, list[str]]:
    """Name==version of each package in a lock file, and its hashes."""
    joined = re.sub(r"#.*", "", text_of(lock)).replace("\\\n", " ")
    entries = [line.split() for line in joined.splitlines() if line.strip()]
    return {entry[0]: [word for word in entry[1:] if word.startswith("--hash=sha256:")] for entry in entries}


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == server.__version__


def test_there_are_lock_files_for_running_testing_and_developing() -> None:
    assert {"requirements.txt", "requirements-test.txt", "requirements-dev.txt"} <= {lock.name for lock in LOCKS}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_locked_package_has_one_version_and_hashes(lock: Path) -> None:
    locked = requirements(lock)
    assert locked
    loose = [name for name, hashes in locked.items() if not re.fullmatch(r"[\w.-]+==[\w.!+]+", name) or not hashes]
    assert loose == []
    assert re.findall(r"^\s*--(?!hash=)\S+|\w+://\S+", text_of(lock), re.MULTILINE) == []


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("requirements.txt", ()),
        ("requirements-test.txt", ("bench", "test")),
        ("requirements-dev.txt", ("bench", "test", "dev")),
    ],
)
def test_lock_files_hold_what_pyproject_asks_for(lock: str, extras: tuple[str, ...]) -> None:
    metadata = project()["project"]
    asked = list(metadata["dependencies"])
    for extra in extras:
        asked += metadata["optional-dependencies"][extra]
    names = {re.split(r"[\[<>=;~! ]", requirement)[0].lower() for requirement in asked}
    built = {"glmserve", "llama-cpp-python"}  # the latter by scripts/build_llama, from a lock file of its own
    locked = {requirement.partition("==")[0].lower() for requirement in requirements(ROOT / lock)}
    assert names - built <= locked


def test_narrow_lock_files_agree_with_wide_ones() -> None:
    wide = set(requirements(ROOT / "requirements-dev.txt"))
    assert set(requirements(ROOT / "requirements-test.txt")) <= wide
    assert set(requirements(ROOT / "requirements.txt")) <= wide


def test_llama_cpp_python_is_built_in_the_version_that_pyproject_pins() -> None:
    (pin,) = [name for name in project()["project"]["dependencies"] if name.startswith("llama-cpp-python")]
    assert list(requirements(ROOT / "requirements-llama.txt")) == [pin]


def test_no_file_names_the_host_of_a_package_registry() -> None:
    # written in two parts each, so that this file does not name one either
    hosts = re.compile(
        "|".join(
            first + r"\." + second
            for first, second in (
                ("pypi", "org"),
                ("pythonhosted", "org"),
                ("npmjs", "(org|com)"),
                ("crates", "io"),
                ("anaconda", "(org|com)"),
                ("deb", r"debian\.org"),
                ("ubuntu", "com"),
                ("download", r"pytorch\.org"),
                ("rubygems", "org"),
                ("maven", r"apache\.org"),
                ("proxy", r"golang\.org"),
                ("ghcr", "io"),
                ("quay", "io"),
                ("docker", "io"),
                ("nvcr", "io"),
            )
        )
    )
    assert [relative(path) for path in FILES if path.suffix != ".gguf" and hosts.search(text_of(path))] == []


def test_modules_are_named_after_their_subject() -> None:
    nameless = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
    assert [relative(path) for path in FILES if nameless & {part.removesuffix(".py") for part in path.parts}] == []


def test_nothing_is_left_open() -> None:
    marks = re.compile("TO" "DO|FIX" "ME|NotImplemented" "Error|mark" r"\.(skip|xfail)|pytest" r"\.(skip|xfail)\(")
    sources = [path for path in FILES if path.suffix == ".py" and relative(path).startswith(("server/", "tests/"))]
    assert [relative(path) for path in sources if marks.search(text_of(path))] == []


def test_every_package_folder_can_be_seen_by_the_import_rules() -> None:
    folders = {path.parent for path in FILES if path.suffix == ".py" and relative(path).startswith("server/")}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_in_the_documents_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z]+)", text_of(page), re.MULTILINE))
    assert named <= make_targets()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_in_the_documents_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text_of(page))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    last = text_of(ROOT / ".ci" / "run").strip().splitlines()[-1]
    assert last == "make test"
    assert re.search(rf"^{last}\b", text_of(ROOT / "README.md"), re.MULTILINE)


def test_tests_cannot_reach_the_network() -> None:
    with socket.socket() as probe, pytest.raises(RuntimeError, match=r"a test tried to connect to 192\.0\.2\.1"):
        probe.connect(("192.0.2.1", 9))
