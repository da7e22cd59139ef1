"""What can be wrong with the files of a model, each as one sentence: the file, the byte, the cause and the way out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class FaultKind(StrEnum):
    MISSING = "missing"  # a shard, or a file that the manifest lists
    UNREADABLE = "unreadable"
    NOT_A_MODEL = "not a model"  # another format, another kind of GGUF
    LFS_POINTER = "lfs pointer"
    WEB_PAGE = "web page"
    DAMAGED_HEADER = "damaged header"
    TRUNCATED = "truncated"
    CONCATENATED = "concatenated"
    HOLE = "hole"  # never written: the file system has nothing there
    ZEROS = "zeros"  # written, or filled in by a copy, as zeros
    SHARD_NUMBER = "shard number"
    DUPLICATE_SHARD = "duplicate shard"
    MIXED_SETS = "mixed sets"
    WRONG_SIZE = "wrong size"
    WRONG_HASH = "wrong hash"
    MANIFEST = "manifest"


# What getting the bytes once more mends; the others are names, rights and choices.
REFETCHED = frozenset(FaultKind) - {FaultKind.UNREADABLE, FaultKind.CONCATENATED, FaultKind.MANIFEST}


@dataclass(frozen=True, slots=True)
class Fault:
    """`cause` names the file; `byte` and `end` (exclusive) say where in it, as far as that is known."""

    kind: FaultKind
    file: Path
    cause: str
    remedy: str
    byte: int | None = None
    end: int | None = None

    @property
    def sentence(self) -> str:
        return f"{self.cause}; {self.remedy}"

    def with_remedy(self, remedy: str) -> Fault:
        return dataclasses.replace(self, remedy=remedy)


def unreadable(file: Path, error: OSError) -> Fault:
    return Fault(
        FaultKind.UNREADABLE,
        file,
        f"cannot read '{error.filename or file}': {error.strerror or error}",
        "give the user that runs the server the right to read it, or another path",
    )
