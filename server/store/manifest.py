"""What the files of a model should be: `.glmserve.json`, which `fetch` writes beside the files that it fetched.

    {"format": 1, "sets": [{"repo": "unsloth/GLM-5.2-GGUF", "revision": "<commit>", "quant": "UD-Q4_K_M",
      "files": [{"name": "GLM-5.2-UD-Q4_K_M-00001-of-00011.gguf", "size_bytes": 49000000000, "sha256": "<64 hex>"}]}]}

Names are relative to the manifest's folder, with /. One folder may hold several quants: each is a set of its own, and
writing one leaves the others. It is written when a download is complete, never before.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from server.errors import ModelFileError

MANIFEST_NAME = ".glmserve.json"
FORMAT = 1
FOLDERS_ABOVE = 3  # in which the manifest of a file may lie: repositories have a folder for each quant

_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileRecord(msgspec.Struct, frozen=True):
    """`sha256` in lower case; None where the hub told none."""

    name: str
    size_bytes: int
    sha256: str | None = None

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.name).parts
        if not parts or self.name.startswith("/") or ".." in parts or "\0" in self.name:
            raise ValueError(f"{self.name!r} is no file name below the manifest's folder")
        if self.size_bytes < 0:
            raise ValueError(f"the size of {self.name!r} is negative")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"the sha256 of {self.name!r} is not 64 hexadecimal digits in lower case")


class FileSet(msgspec.Struct, frozen=True):
    """The files of one quant of one repository at one commit. `repo` is None for files that come from elsewhere."""

    repo: str | None
    revision: str | None
    quant: str | None
    files: tuple[FileRecord, ...]

    @property
    def hub_name(self) -> str | None:
        """As `fetch` and `--gguf` take it: REPO:QUANT."""
        return f"{self.repo}:{self.quant}" if self.repo and self.quant else self.repo

    @property
    def n_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def repair_command(self, folder: Path) -> str | None:
        """What gets only the bad parts once more. `folder` is the manifest's. None: files from elsewhere."""
        if self.hub_name is None:
            return None
        return shlex.join(["python", "-m", "server", "fetch", self.hub_name, "--to", str(folder), "--repair"])


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    sets: tuple[FileSet, ...]


def read_manifest(folder: Path) -> tuple[FileSet, ...]:
    """The sets that are recorded for a folder; none without a manifest. Raises ModelFileError when it is damaged, and
    OSError when it cannot be read."""
    file = folder / MANIFEST_NAME
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    try:
        manifest = msgspec.json.decode(content, type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ModelFileError(
            f"the manifest '{file}' is damaged: {error}; remove it and fetch the model again"
        ) from None
    if manifest.format != FORMAT:
        raise ModelFileError(
            f"the manifest '{file}' has format {manifest.format}, but this version reads {FORMAT}; "
            f"use the version that fetched the model, or remove the file and fetch again"
        )
    return manifest.sets


def write_manifest(folder: Path, files: FileSet) -> Path:
    """Record a set in place of the one that has the same repository and quant. Whole or not at all. Raises OSError."""
    try:
        others = [each for each in read_manifest(folder) if (each.repo, each.quant) != (files.repo, files.quant)]
    except ModelFileError:
        others = []  # damaged: what was just fetched is known, the rest is not
    file = folder / MANIFEST_NAME
    manifest = _Manifest(FORMAT, (*others, files))
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return file


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a manifest says about one file; `folder` is the manifest's."""

    folder: Path
    files: FileSet
    record: FileRecord

    @property
    def repair_command(self) -> str | None:
        return self.files.repair_command(self.folder)


def find_record(file: Path) -> Recorded | None:
    """The record of a file, in a manifest beside it or some folders above; of several sets the last written. None also
    where the manifest cannot be read: verify tells that."""
    for folder in (file.parent, *file.parent.parents[:FOLDERS_ABOVE]):
        try:
            sets = read_manifest(folder)
        except (ModelFileError, OSError):
            continue
        name = file.relative_to(folder).as_posix()
        for files in reversed(sets):
            for record in files.files:
                if record.name == name:
                    return Recorded(folder, files, record)
    return None
