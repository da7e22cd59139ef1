"""Lock files read for a target that is not this machine, and what pip is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.errors import BundleError
from server.store.bundle import wheels
from server.store.bundle.description import Target
from server.store.bundle.wheels import cuda_lock, fetch_wheels, for_target, platform_tags, read_lock
from tests.store.bundle.bundles import wheel

LOCK = """\
# made by
a==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
old==2 ; python_full_version < '3.12' \\
    --hash=sha256:cc
win==3 ; sys_platform == 'win32' \\
    --hash=sha256:dd
arm==4 ; platform_machine == 'aarch64' and sys_platform == 'linux' --hash=sha256:ee
"""
ROOT = Path(__file__).parents[3]


def names(python: tuple[int, int], machine: str = "x86_64") -> list[str]:
    return [each.name for each in for_target(read_lock(LOCK), Target(python, machine, (2, 28)))]


def test_markers_are_judged_for_the_target() -> None:
    assert names((3, 11)) == ["a", "old"]
    assert names((3, 12)) == ["a"]
    assert names((3, 13), "aarch64") == ["a", "arm"]


def test_locked_packages_keep_version_and_hashes() -> None:
    first = read_lock(LOCK)[0]
    assert first.text == "a==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"


@pytest.mark.parametrize("line", ["a>=1 --hash=sha256:aa", "a==1", "-r other.txt"])
def test_lines_that_are_not_locked_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not NAME==VERSION"):
        read_lock(line)


@pytest.mark.parametrize("lock", sorted(path.name for path in ROOT.glob("requirements*.txt")))
def test_the_projects_own_locks_can_be_read(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert len(read_lock(text)) == text.count("==") - text.count("== '")


def test_older_platforms_count_too() -> None:
    tags = platform_tags(Target((3, 11), "x86_64", (2, 28)))
    assert tags[0] == "manylinux_2_28_x86_64"
    assert {"manylinux2014_x86_64", "manylinux1_x86_64", "manylinux_2_17_x86_64", "linux_x86_64"} <= set(tags)


def test_pip_gets_the_targets_packages_with_their_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements.txt").write_text(LOCK)
    (tmp_path / "requirements-build.txt").write_text("pip==26.3 --hash=sha256:ff\ncmake==3 --hash=sha256:ff\n")
    house = tmp_path / "house"
    house.mkdir()
    seen: list[tuple[list[str], str]] = []

    def run_pip(arguments: list[str], trouble: str) -> None:
        seen.append((arguments, Path(arguments[-1]).read_text()))

    monkeypatch.setattr(wheels, "run_pip", run_pip)
    locks = ["requirements.txt", "requirements-build.txt"]
    fetch_wheels(tmp_path, house, Target((3, 12), "x86_64", (2, 28)), locks, lambda line: None)
    ((arguments, text),) = seen
    assert arguments[0] == "download"
    assert {"--require-hashes", "--no-deps", ":all:", "3.12", "manylinux_2_28_x86_64"} <= set(arguments)
    assert [each.name for each in read_lock(text)] == ["a", "pip"]
    assert list(house.iterdir()) == []


def test_pips_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match=r"it cannot be done: ERROR: .*nothing-of-this-name"):
        wheels.run_pip(["install", "--no-index", "nothing-of-this-name"], "it cannot be done")


def test_the_cuda_libraries_are_those_that_the_backend_was_linked_against(tmp_path: Path) -> None:
    lib = "llama_cpp/lib/libggml-cuda.so"
    for version in ("12", "13"):
        built = wheel(tmp_path / version, "llama_cpp_python", {lib: f"..\0libcudart.so.{version}\0".encode()})
        assert (ROOT / cuda_lock(built)).is_file()
        assert version in cuda_lock(built)
    with pytest.raises(BundleError, match="neither 12 nor 13"):
        cuda_lock(wheel(tmp_path / "11", "llama_cpp_python", {lib: b"\0libcudart.so.11.0\0"}))
