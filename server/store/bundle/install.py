"""The far side: check a bundle and install it into a folder, on a machine that has Python and no network.

Standard library only; a bundle carries this module and its neighbours. Nothing here opens a connection, and pip, which
installs the wheels, is told to look at the bundle alone.

    PREFIX/venv/            Python with the server and all it needs
    PREFIX/model/           the shards
    PREFIX/glmserve.toml    settings; kept when it is there already
    PREFIX/start            starts the server with these settings
    PREFIX/glmserve.service a unit for systemd
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.errors import BundleError
from server.store.bundle.bag import MANIFEST, PAYLOAD, Checked, OnBytes, Verification
from server.store.bundle.description import Description, read_description, this_machine
from server.store.bundle.transfer import bytes_to_copy, carry, gib, require_space

INSTALLED = "installed.json"
REQUIREMENTS = "requirements.txt"
_UNPACKED = 4  # how much larger wheels are once installed, with bytecode

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Installed:
    prefix: Path
    python: Path
    model: Path
    config: Path

    @property
    def command(self) -> str:
        """The line that starts the server."""
        return shlex.join([str(self.python), "-m", "server", "--gguf", str(self.model), "--parallel", "2"])


def verify(folder: Path, on_bytes: OnBytes | None = None, *, trust_finished: bool = False) -> Checked:
    """Check every byte of a bundle; faults are in what comes back. Raises BundleError for what is no bundle."""
    verification = Verification(folder, trust_finished=trust_finished)
    if not verification.check_tags():
        damaged = {fault.path for fault in verification.checked.faults}
        if MANIFEST in damaged or not (folder / MANIFEST).is_file() or "bundle.json" in damaged:
            return verification.checked  # what the payload should be is not known
        if any("does not belong" not in fault.what for fault in verification.checked.faults):
            return verification.checked
    return verification.check_payload(read_description(folder).known, on_bytes)


def install(
    folder: Path, prefix: Path, *, say: Say, on_bytes: OnBytes | None = None, model_in_place: bool = False
) -> Installed:
    """Raises BundleError, before PREFIX is touched, when the bundle is damaged or not for this machine."""
    checked = verify(folder, on_bytes, trust_finished=True)
    if checked.faults:
        raise BundleError(
            f"the bundle '{folder}' is damaged, nothing was installed: {checked.faults[0]}"
            + (f" (and {len(checked.faults) - 1} more; `bundle verify` lists them)" if len(checked.faults) > 1 else "")
        )
    say(f"checked {checked.n_files} files, {gib(checked.n_bytes)}: all as they were packed")
    description = read_description(folder)
    misfit = description.target.misfit(this_machine())
    if misfit:
        raise BundleError(f"the bundle '{folder}' cannot be installed here: {misfit}")
    prefix = prefix.absolute()
    _require_fit(prefix)
    shards = [folder / PAYLOAD / "model" / name for name in description.model]
    wheels = sorted((folder / PAYLOAD / "wheels").glob("*.whl"))
    n_bytes = _UNPACKED * sum(wheel.stat().st_size for wheel in wheels)
    n_bytes += 0 if model_in_place else bytes_to_copy(shards, prefix)
    require_space(prefix, n_bytes, "the installation")

    prefix.mkdir(parents=True, exist_ok=True)
    python = _make_environment(folder, prefix, wheels, say)
    model = _place_model(shards, prefix, say, in_place=model_in_place)
    installed = Installed(prefix, python, model, prefix / "glmserve.toml")
    _write_texts(folder, installed, description)
    _try_out(python)
    return installed


def _require_fit(prefix: Path) -> None:
    if prefix.exists() and not prefix.is_dir():
        raise BundleError(f"'{prefix}' is a file; give --prefix a folder that is empty or new")
    if prefix.is_dir() and any(prefix.iterdir()) and not (prefix / INSTALLED).is_file():
        raise BundleError(
            f"'{prefix}' holds other things than an earlier installation of a bundle; give --prefix a folder that is "
            f"empty or new"
        )


def _make_environment(folder: Path, prefix: Path, wheels: list[Path], say: Say) -> Path:
    """PREFIX/venv with everything of the wheelhouse. The bundle's own pip installs: Debian's Python has none."""
    place = prefix / "venv"
    (prefix / INSTALLED).write_text("{}\n", encoding="utf-8")  # a broken attempt may be repeated
    say(f"making {place}")
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(place)
    except (OSError, subprocess.SubprocessError) as error:
        raise BundleError(f"Python cannot make the virtual environment '{place}': {error}") from None
    python = place / "bin" / "python"
    pip = next((wheel for wheel in wheels if wheel.name.startswith("pip-")), None)
    if pip is None:
        raise BundleError(f"the bundle '{folder}' has no wheel of pip, so nothing can be installed; make it again")
    say(f"installing {len(wheels)} packages")
    requirements = folder / PAYLOAD / "wheels" / REQUIREMENTS
    command = [str(python), str(pip / "pip"), "install", "--no-index", "--find-links", str(requirements.parent)]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--isolated"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--no-input", "-r", str(requirements)],
        env=_quiet_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BundleError(f"pip could not install the bundle's wheels: {_last_line(done.stderr or done.stdout)}")
    return python


def _quiet_environment() -> dict[str, str]:
    """The environment without what would lead Python or pip elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}


def _place_model(shards: list[Path], prefix: Path, say: Say, *, in_place: bool) -> Path:
    if in_place:
        say(f"the model stays in {shards[0].parent}")
        return shards[0].absolute()
    folder = prefix / "model"
    if folder.exists():
        shutil.rmtree(folder)
    ways = {carry(shard, folder / shard.name) for shard in shards}
    say(f"{len(shards)} model files {' and '.join(sorted(way.value for way in ways))} to {folder}")
    return folder / shards[0].name


def _write_texts(folder: Path, installed: Installed, description: Description) -> None:
    prefix = installed.prefix
    settings = (folder / PAYLOAD / "config" / "glmserve.toml").read_text(encoding="utf-8")
    if not installed.config.exists():
        gguf = json.dumps(str(installed.model), ensure_ascii=False)  # a JSON text is a TOML text as well
        installed.config.write_text(f"gguf = {gguf}\n{settings}", encoding="utf-8")
    start = prefix / "start"
    start.write_text(
        "#!/bin/sh\n"
        "# Starts the server; further flags are passed on and win over glmserve.toml.\n"
        "export PYTHONSAFEPATH=1  # else a folder named server, where this is called, would take its place\n"
        f"exec {shlex.quote(str(installed.python))} -m server --config {shlex.quote(str(installed.config))} "
        '"$@"\n',
        encoding="utf-8",
    )
    start.chmod(0o755)
    (prefix / "glmserve.service").write_text(_unit(installed), encoding="utf-8")
    for name in ("licenses", "sbom.cdx.json"):
        source = folder / PAYLOAD / name
        if source.is_dir():
            shutil.copytree(source, prefix / name, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, prefix / name)
    record = {"name": description.name, "glmserve": description.made_with, "bundle": str(folder.absolute())}
    (prefix / INSTALLED).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _unit(installed: Installed) -> str:
    start = _unit_quoted(str(installed.prefix / "start"))
    return f"""\
# Copy to /etc/systemd/system, then: useradd --system glmserve; systemctl daemon-reload; systemctl enable --now glmserve
[Unit]
Description=glmserve
After=network.target

[Service]
User=glmserve
ExecStart={start}
Restart=on-failure
RestartSec=10
KillMode=mixed
TimeoutStopSec=60
LimitNOFILE=65536
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def _unit_quoted(path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != path or " " in path else path


def _try_out(python: Path) -> None:
    """That the server can be imported, and llama.cpp's library loaded, is tried here and not at the first start."""
    done = subprocess.run(
        [str(python), "-m", "server", "--list-devices"],
        env=_quiet_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=python.parent,
    )
    if done.returncode:
        raise BundleError(f"everything is installed, but the server does not start: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it gave no reason"


# ── install.py of a bundle ───────────────────────────────────────────────────────────────────────────────────────────


def main(folder: Path) -> int:
    """What install.py of a bundle runs: `python3 install.py --prefix P`, or without --prefix a check alone."""
    import argparse

    parser = argparse.ArgumentParser(prog="install.py", description="Check this bundle and install it. No network.")
    parser.add_argument("--prefix", type=Path, help="folder to install into, empty or new; without it: check only")
    parser.add_argument("--model-in-place", action="store_true", help="serve the model from the bundle, do not copy it")
    given = parser.parse_args()
    progress = Progress(sys.stderr.isatty())
    try:
        if given.prefix is None:
            checked = verify(folder, progress)
            progress.end()
            for line in report(folder, checked):
                print(line)
            return BundleError.exit_code if checked.faults else 0
        installed = install(folder, given.prefix, say=_say, on_bytes=progress, model_in_place=given.model_in_place)
    except BundleError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    _say(f"installed. Start it with\n\n    {installed.command}\n\nor {installed.prefix / 'start'}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def report(folder: Path, checked: Checked) -> list[str]:
    """What a person is told after a check."""
    lines = [f"{fault}" for fault in checked.faults]
    resumed = f" ({checked.n_resumed} of them read by an earlier, interrupted check)" if checked.n_resumed else ""
    if checked.faults:
        count = len(checked.faults)
        lines.append(f"'{folder}': {count} {'file is' if count == 1 else 'files are'} not as packed; see above")
    else:
        lines.append(f"'{folder}': {checked.n_files} files, {gib(checked.n_bytes)}, all as they were packed{resumed}")
    return lines


class Progress:
    """Called with the bytes read, from several threads; a line that rewrites itself on a terminal, else nothing."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._n_bytes = 0
        self._told = 0

    def __call__(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes  # a lost update shows a little less, nothing else
        if self._shown and self._n_bytes - self._told >= 256 << 20:
            self._told = self._n_bytes
            sys.stderr.write(f"\r  {gib(self._n_bytes)} read ")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown and self._told:
            sys.stderr.write("\r" + " " * 40 + "\r")
