"""The wheelhouse of a bundle: every locked package for the target, the server, llama-cpp-python and pip, as wheels.

pip fetches; what it may fetch is said by the hash-locked requirement files of the source tree. pip judges markers
("; python_version < '3.13'") by the Python that runs it, so they are settled here, for the target.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

from server.errors import BundleError
from server.store.bundle.bag import sums_of
from server.store.bundle.description import Target
from server.store.bundle.transfer import carry

RUNTIME_LOCK = "requirements.txt"
BUILD_LOCK = "requirements-build.txt"
CUDA_LOCK = "requirements-cuda{}.txt"
_GLIBC = re.compile(rb"\x00GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\x00)")
_OLD_NAMES = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}  # PEP 600

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Locked:
    """A package of a lock file."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def text(self) -> str:
        hashes = "".join(f" \\\n    --hash=sha256:{each}" for each in self.hashes)
        return f"{self.name}=={self.version}{hashes}\n"


def read_lock(text: str) -> list[Locked]:
    """Raises ValueError for a line that is no locked package."""
    found = []
    for line in re.sub(r"(?m)#.*$", "", text).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        requirement, *hashes = line.split("--hash=sha256:")
        match = re.fullmatch(r"\s*([\w.-]+)==([^\s;]+)\s*(?:;\s*(.*?))?\s*", requirement)
        if match is None or not hashes:
            raise ValueError(f"'{requirement.strip()}' is not NAME==VERSION with hashes")
        name, version, marker = match.groups()
        found.append(Locked(name, version, marker or "", tuple(each.strip() for each in hashes)))
    return found


def for_target(locked: list[Locked], target: Target) -> list[Locked]:
    """Those that the target needs, by their markers."""
    version = f"{target.python[0]}.{target.python[1]}"
    environment = {
        "implementation_name": "cpython",
        "implementation_version": f"{version}.0",
        "os_name": "posix",
        "platform_machine": target.machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{version}.0",
        "python_version": version,
        "sys_platform": "linux",
    }
    return [each for each in locked if not each.marker or Marker(each.marker).evaluate(environment)]


def platform_tags(target: Target) -> list[str]:
    """What pip calls the platforms whose wheels run on the target, the newest first."""
    tags = []
    for minor in range(target.glibc[1], 4, -1):
        tags.append(f"manylinux_2_{minor}_{target.machine}")
        if (2, minor) in _OLD_NAMES:
            tags.append(f"{_OLD_NAMES[2, minor]}_{target.machine}")
    return [*tags, f"linux_{target.machine}"]


def fetch_wheels(root: Path, to: Path, target: Target, locks: list[str], say: Say) -> None:
    """Fill `to` with the packages of the lock files. Raises BundleError with pip's reason."""
    packages: dict[str, Locked] = {}
    for lock in locks:
        for each in for_target(read_lock((root / lock).read_text(encoding="utf-8")), target):
            if lock != BUILD_LOCK or each.name == "pip":  # of what builds, only pip goes along
                packages[each.name] = each
    say(f"fetching {len(packages)} packages for {target}")
    list_file = to / "fetch.txt"
    list_file.write_text("".join(each.text for each in packages.values()), encoding="utf-8")
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-d", str(to)]
    command += ["--implementation", "cp", "--python-version", f"{target.python[0]}.{target.python[1]}"]
    for tag in platform_tags(target):
        command += ["--platform", tag]
    run_pip([*command, "-r", str(list_file)], "the packages cannot be fetched")
    list_file.unlink()


def build_server_wheel(root: Path, to: Path) -> None:
    """The server as a wheel, by setuptools of the build lock, in an environment of its own."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="glmserve-wheel-") as work:
        place = Path(work) / "tools"
        chosen = [each for each in read_lock((root / BUILD_LOCK).read_text()) if each.name in {"setuptools", "wheel"}]
        (Path(work) / "lock.txt").write_text("".join(each.text for each in chosen), encoding="utf-8")
        locked = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", f"{work}/lock.txt"]
        run_pip(["install", "--quiet", "--target", str(place), *locked], "setuptools cannot be fetched")
        source = Path(work) / "source"
        _copy_sources(root, source)
        command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(to), str(source)]
        run_pip(command, "the server's wheel cannot be built", extra_path=place)


def _copy_sources(root: Path, to: Path) -> None:
    """What the wheel is made of; setuptools leaves build/ and egg-info behind, and not in the user's tree."""
    import shutil

    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / name, to / name)
    shutil.copytree(root / "server", to / "server", ignore=shutil.ignore_patterns("__pycache__"))


def build_llama_wheel(root: Path, target: Target, cuda: tuple[str, ...], say: Say) -> Path:
    """llama-cpp-python for any machine of the target's kind: scripts/build_llama, which keeps what it has built."""
    import os
    import platform

    if target.machine != platform.machine():
        raise BundleError(
            f"llama.cpp is compiled on the kind of machine that it is for: this one is {platform.machine()}, the "
            f"target {target.machine}; build it there with GLMSERVE_PORTABLE=on scripts/build_llama and give its "
            f"wheel with --llama-wheel"
        )
    script = root / "scripts" / "build_llama"
    environment = os.environ | {"GLMSERVE_PORTABLE": "on", "GLMSERVE_CUDA": "on" if cuda else "off"}
    if cuda:
        environment["CUDAARCHS"] = ";".join(cuda)
    process = subprocess.Popen(
        [str(script), sys.executable, "--no-install"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        if last:
            say(last)
        last = line.rstrip()
    if process.wait() or not last.endswith(".whl"):
        raise BundleError("llama-cpp-python could not be built; the reason is above")
    return Path(last)


def needed_glibc(wheels: list[Path]) -> tuple[int, int]:
    """The newest version of glibc that a library in these wheels asks for: what the far side must have."""
    newest = (2, 17)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".so" in name:
                    versions = _GLIBC.findall(archive.read(name))
                    newest = max([newest, *((int(major), int(minor)) for major, minor in versions)])
    return newest


def add_wheel(wheel: Path, to: Path) -> None:
    if not (to / wheel.name).exists():
        carry(wheel, to / wheel.name)


def write_requirements(to: Path, name: str) -> None:
    """One line for each wheel that is there, with its own hash: the far side installs exactly these files."""
    lines = []
    for wheel in sorted(to.glob("*.whl")):
        package, version = wheel.name.split("-")[:2]
        lines.append(f"{package.replace('_', '-')}=={version} --hash=sha256:{sums_of(wheel, blocks=False).sha256}\n")
    (to / name).write_text("".join(lines), encoding="utf-8", newline="\n")


def run_pip(arguments: list[str], trouble: str, *, extra_path: Path | None = None) -> None:
    """pip of this Python, with its configuration (mirrors). Raises BundleError with its last words."""
    import os

    environment = dict(os.environ)
    if extra_path is not None:
        environment["PYTHONPATH"] = str(extra_path)
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise BundleError(f"{trouble}: {' '.join(errors)[-600:] or 'pip gave no reason'}")


def cuda_lock(llama: Path) -> str:
    """The lock file with the CUDA libraries that a wheel's backend was linked against. Raises BundleError."""
    with zipfile.ZipFile(llama) as archive:
        for name in archive.namelist():
            if name.endswith("/libggml-cuda.so"):
                match = re.search(rb"\x00libcudart\.so\.(\d+)\x00", archive.read(name))
                if match and match[1] in (b"12", b"13"):
                    return CUDA_LOCK.format(match[1].decode())
                raise BundleError(f"'{llama.name}' is linked against a CUDA that is neither 12 nor 13; build it anew")
    raise BundleError(f"'{llama.name}' has no CUDA backend; build it with GLMSERVE_CUDA=on, or leave --cuda out")
