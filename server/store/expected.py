"""What is known about the files of a model from outside: sizes and SHA-256 sums, from whoever wrote them down.

In this order: `.glmserve.json` of `fetch`; `manifest-sha256.txt` of a bundle (BagIt) and SHA256SUMS; the metadata that
the hub's own client leaves beside downloaded files, and the names of the blobs in its cache, which are the sums; and
the recipes, for files of which every byte is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.errors import ModelFileError
from server.store.faults import Fault, FaultKind, unreadable
from server.store.manifest import FOLDERS_ABOVE, FileSet, read_manifest
from server.store.recipes import Recipe

_SUM_LISTS = ("manifest-sha256.txt", "SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt", "sha256sum.txt")
_SUM_LINE = re.compile(r"\\?([0-9a-fA-F]{64})[ \t]+\*?(\S.*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Expected:
    """None: not told. `source` completes "by …"; `remedy` is what to do when the file is otherwise."""

    size_bytes: int | None
    sha256: str | None
    source: str
    remedy: str = "fetch or copy the file again"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`files` has everything that the lists name in the folders of the files asked about and below, there or not."""

    files: Mapping[Path, Expected]
    faults: tuple[Fault, ...]  # of the lists themselves

    def sum_of(self, file: Path) -> str | None:
        expected = self.files.get(file)
        return expected.sha256 if expected else None


def gather(files: Sequence[Path], recipes: Sequence[Recipe] = ()) -> Knowledge:
    """What the lists near these files say. Raises nothing: a list that cannot be read is a fault."""
    known: dict[Path, Expected] = {}
    faults: list[Fault] = []
    folders = list(dict.fromkeys(file.parent for file in files))
    for folder in folders:
        for above in (folder, *folder.parents[:FOLDERS_ABOVE]):
            for path, expected in _listed_in(above, faults):
                if path.is_relative_to(folder):
                    known.setdefault(path, expected)
    for file in files:
        told = _by_hub_client(file) or _by_recipe(file, recipes)
        if told:
            known.setdefault(file, told)
    return Knowledge(known, tuple(faults))


def _listed_in(folder: Path, faults: list[Fault]) -> Iterator[tuple[Path, Expected]]:
    try:
        for files in read_manifest(folder):
            yield from _of_set(folder, files)
    except ModelFileError as error:
        cause, _, remedy = error.message.rpartition("; ")
        _add(faults, Fault(FaultKind.MANIFEST, folder, cause, remedy))
    except OSError as error:
        _add(faults, unreadable(folder, error))
    for name in _SUM_LISTS:
        try:
            yield from _of_sums(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            _add(faults, unreadable(folder / name, error))
        except ValueError as error:
            cause = f"the list '{folder / name}' is damaged: {error}"
            _add(faults, Fault(FaultKind.MANIFEST, folder / name, cause, "copy it from its source again"))


def _add(faults: list[Fault], fault: Fault) -> None:
    if fault not in faults:
        faults.append(fault)


def _of_set(folder: Path, files: FileSet) -> Iterator[tuple[Path, Expected]]:
    at = f" at {files.revision[:12]}" if files.revision else ""
    source = f"{files.repo}{at}" if files.repo else "the manifest of fetch"
    command = files.repair_command(folder)
    remedy = f"run: {command}" if command else "fetch or copy the file again"
    for file in files.files:
        yield folder / file.name, Expected(file.size_bytes, file.sha256, source, remedy)


def _of_sums(file: Path) -> Iterator[tuple[Path, Expected]]:
    """Lines as sha256sum writes them; BagIt's have the same form, with %0A, %0D and %25 in names."""
    bagged = file.name == "manifest-sha256.txt" and file.with_name("bagit.txt").is_file()
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _SUM_LINE.fullmatch(line.rstrip())
        if match is None:
            raise ValueError(f"line {number} is no SHA-256 sum with a file name behind it")
        name = match[2]
        if bagged:
            name = re.sub("%(0A|0D|25)", lambda code: chr(int(code[1], 16)), name, flags=re.IGNORECASE)
        if "\0" in name or ".." in Path(name).parts:
            raise ValueError(f"line {number} names a file that is none of its folder's")
        source = "the bundle's manifest" if bagged else file.name
        remedy = "copy this file from the bundle's disk again" if bagged else "fetch or copy the file again"
        yield file.parent / name, Expected(None, match[1].lower(), source, remedy)


def _by_hub_client(file: Path) -> Expected | None:
    """The hub's client keeps the sum as the name of a blob in its cache, or in a small file beside a local folder."""
    if file.is_symlink():
        blob = file.readlink()
        if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
            return Expected(None, blob.name, "the hub's cache")
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        lines = note.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if len(lines) > 1 and _SHA256.fullmatch(lines[1]):  # commit, ETag, time; of big files the ETag is the sum
        return Expected(None, lines[1], f"the hub at {lines[0][:12]}")
    return None


def _by_recipe(file: Path, recipes: Sequence[Recipe]) -> Expected | None:
    for recipe in recipes:
        for known in recipe.shards:
            if known.name == file.name:
                return Expected(known.size_bytes, known.sha256, f"the recipe {recipe.name}")
    return None
