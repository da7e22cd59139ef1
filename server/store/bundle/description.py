"""bundle.json: what a bundle holds and what it is made for. Standard library only (see bag.py)."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import BundleError
from server.store.bundle.bag import Known

DESCRIPTION = "bundle.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that a bundle is made for."""

    python: tuple[int, int]
    machine: str  # as `uname -m` says it: x86_64, aarch64
    glibc: tuple[int, int]  # the oldest that will do

    def __str__(self) -> str:
        return f"Linux {self.machine}, Python {_dotted(self.python)}, glibc {_dotted(self.glibc)} or newer"

    def misfit(self, here: Target) -> str | None:
        """Why a bundle for this target cannot be installed on `here`, or None."""
        if here.machine != self.machine:
            return f"it is made for processors of the kind {self.machine}, but this machine is {here.machine}"
        if here.python != self.python:
            return (
                f"it is made for Python {_dotted(self.python)}, but this is Python {_dotted(here.python)}; run "
                f"python{_dotted(self.python)} install.py …"
            )
        if here.glibc < self.glibc:
            return (
                f"it needs glibc {_dotted(self.glibc)} or newer, but this system has {_dotted(here.glibc)}; make the "
                f"bundle on a system as old as this one, or take a newer system here"
            )
        return None


def this_machine() -> Target:
    return Target(sys.version_info[:2], platform.machine(), _glibc())


def _glibc() -> tuple[int, int]:
    """(0, 0) where there is none."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = version.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else (0, 0)
    except (ValueError, OSError):
        return 0, 0


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True, slots=True)
class Description:
    """`model`: the files in shard order, by their names in data/model. `cuda`: GPU architectures of the build, or
    none. `known` has sizes and block checksums of the payload by path."""

    name: str
    made_with: str  # version of glmserve
    target: Target
    model: tuple[str, ...]
    cuda: tuple[str, ...]
    image: str | None
    known: Known

    def write(self, folder: Path) -> None:
        record = {
            "format": FORMAT,
            "name": self.name,
            "glmserve": self.made_with,
            "python": list(self.target.python),
            "machine": self.target.machine,
            "glibc": list(self.target.glibc),
            "model": list(self.model),
            "cuda": list(self.cuda),
            "image": self.image,
            "files": {
                path: {"bytes": n_bytes, "crc32_of_64_mib": list(self.known.blocks.get(path, ()))}
                for path, n_bytes in sorted(self.known.n_bytes.items())
            },
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        (folder / DESCRIPTION).write_text(text, encoding="utf-8", newline="\n")


def read_description(folder: Path) -> Description:
    """Of a bundle whose tag files are known to be right. Raises BundleError."""
    try:
        record: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise BundleError(
                f"'{folder}' is a bundle of format {record['format']}, made by glmserve {record['glmserve']}; "
                f"use the install.py that it carries"
            )
        files = record["files"]
        return Description(
            name=record["name"],
            made_with=record["glmserve"],
            target=Target((record["python"][0], record["python"][1]), record["machine"], tuple(record["glibc"])),
            model=tuple(record["model"]),
            cuda=tuple(record["cuda"]),
            image=record["image"],
            known=Known(
                {path: file["bytes"] for path, file in files.items()},
                {path: tuple(file["crc32_of_64_mib"]) for path, file in files.items()},
            ),
        )
    except FileNotFoundError:
        raise BundleError(f"'{folder}' is a bag, but no bundle of glmserve: {DESCRIPTION} is not in it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"'{folder / DESCRIPTION}' is not what glmserve writes ({error!r}); copy it again") from None
