"""A bundle cut into pieces that fit on disks, and put together again. Standard library only (see bag.py).

A piece is a folder: piece.json says which slices of which files it has, slices/ holds them, join.py and tools/ put the
bundle together where nothing but Python is. Files are cut where a disk ends, so no disk stays half empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server.errors import BundleError
from server.store.bundle.bag import SEAL, STATE, files_below, is_inside, sums_of
from server.store.bundle.transfer import carry, gib, require_space

PIECE = "piece.json"
PIECE_SUM = "piece-sha256.txt"
SLICES = "slices"
JOIN_STATE = ".join-state.json"
TOOLS = "tools"
_OVERHEAD_BYTES = 4 << 20  # tools, piece.json and what a file system needs for them
_READ_BYTES = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Slice:
    path: str
    offset: int
    n_bytes: int
    file_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.n_bytes == self.file_bytes


# ── cutting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan(files: Iterable[tuple[str, int]], n_bytes: int) -> list[list[Slice]]:
    """Slices of files (path, size) for pieces of at most `n_bytes` each, in order. Every byte is in exactly one."""
    pieces: list[list[Slice]] = [[]]
    room = n_bytes
    for path, file_bytes in files:
        offset = 0
        while True:
            part = min(file_bytes - offset, room)
            if part or not file_bytes:
                pieces[-1].append(Slice(path, offset, part, file_bytes))
            offset, room = offset + part, room - part
            if offset == file_bytes:
                break
            pieces.append([])
            room = n_bytes
    return pieces


def split(folder: Path, to: Path, n_bytes: int, *, say: Say, only: int | None = None) -> list[Path]:
    """Cut the bundle into pieces below `to`; `only`: write this one (from 1), for one disk after another.
    Raises BundleError."""
    if n_bytes <= 2 * _OVERHEAD_BYTES:
        raise BundleError(f"pieces of {n_bytes:,} bytes are too small; give at least {2 * _OVERHEAD_BYTES:,}")
    if not (folder / SEAL).is_file():
        raise BundleError(f"'{folder}' is no finished bundle: it has no {SEAL}; give the folder that `create` made")
    # small files first: whoever has the first disk can read what this is
    paths = [path for path in files_below(folder) if path != STATE and "__pycache__" not in path]
    sizes = sorted(((path, (folder / path).stat().st_size) for path in paths), key=lambda each: (each[1], each[0]))
    pieces = plan(sizes, n_bytes - _OVERHEAD_BYTES)
    numbers = range(1, len(pieces) + 1) if only is None else [only]
    if only is not None and not 1 <= only <= len(pieces):
        raise BundleError(f"there is no piece {only}: pieces of that size are numbered from 1 to {len(pieces)}")
    todo = [each for number in numbers for each in pieces[number - 1]]
    to.mkdir(parents=True, exist_ok=True)
    linked = to.stat().st_dev == folder.stat().st_dev
    require_space(to, sum(each.n_bytes for each in todo if not (linked and each.is_whole)), "splitting")
    bundle = sums_of(folder / SEAL, blocks=False).sha256
    made = []
    for number in numbers:
        place = to / f"{folder.absolute().name}.{number:02d}-of-{len(pieces):02d}"
        _write_piece(folder, place, pieces[number - 1], bundle, number, len(pieces))
        say(f"piece {number} of {len(pieces)}: {place} ({gib(sum(each.n_bytes for each in pieces[number - 1]))})")
        made.append(place)
    return made


def _write_piece(folder: Path, place: Path, slices: list[Slice], bundle: str, number: int, count: int) -> None:
    if place.exists():
        raise BundleError(f"'{place}' is there already; remove it, or give --to another folder")
    (place / SLICES).mkdir(parents=True)
    records = []
    for index, each in enumerate(slices, 1):
        target = place / SLICES / f"{index:04d}"
        if each.is_whole:
            carry(folder / each.path, target)
            sha256 = sums_of(target, blocks=False).sha256
        else:
            sha256 = _copy_slice(folder / each.path, each.offset, target, 0, each.n_bytes)
        records.append({**asdict(each), "sha256": sha256})
    for name in (TOOLS, "join.py"):
        source = folder / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copyfile(source, place / name)
    record = {"bundle": bundle, "name": folder.absolute().name, "number": number, "count": count, "slices": records}
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (place / PIECE).write_text(text, encoding="utf-8", newline="\n")
    (place / PIECE_SUM).write_text(f"{sums_of(place / PIECE, blocks=False).sha256}  {PIECE}\n", encoding="utf-8")


def _copy_slice(source: Path, start: int, target: Path, at: int, n_bytes: int) -> str:
    """Copy a range of bytes into a file, creating it; the range's SHA-256. Raises OSError, EOFError."""
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()
    with open(source, "rb") as reader, open(target, "r+b") as writer:
        reader.seek(start)
        writer.seek(at)
        left = n_bytes
        while left:
            part = reader.read(min(left, _READ_BYTES))
            if not part:
                raise EOFError(f"'{source}' ends {left:,} bytes early")
            digest.update(part)
            writer.write(part)
            left -= len(part)
    return digest.hexdigest()


# ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Piece:
    place: Path
    bundle: str
    name: str
    number: int
    count: int
    slices: tuple[tuple[Slice, str], ...]  # with the SHA-256 of each


@dataclass(frozen=True, slots=True)
class Joined:
    """`missing`: numbers of the pieces that have not been there yet, or were damaged."""

    missing: tuple[int, ...]
    count: int
    faults: tuple[str, ...]


def join(places: Sequence[Path], to: Path, *, say: Say) -> Joined:
    """Put what these pieces hold into `to`. May be called again with further pieces, in any order; what is there
    already is not copied twice. Raises BundleError for pieces of different bundles or a folder of another one."""
    pieces = [_read_piece(place) for place in _pieces_in(places)]
    first = pieces[0]
    for piece in pieces:
        if (piece.bundle, piece.count) != (first.bundle, first.count):
            raise BundleError(
                f"'{piece.place}' and '{first.place}' are pieces of different bundles or of different splits; join "
                f"those of one split"
            )
    state = _JoinState(to, first)
    faults: list[str] = []
    for piece in sorted(pieces, key=lambda each: each.number):
        if piece.number in state.done:
            continue
        fault = _join_piece(piece, to)
        if fault is None:
            state.add(piece.number)
            say(f"piece {piece.number} of {piece.count} is right")
        else:
            faults.append(fault)
    missing = tuple(sorted(set(range(1, first.count + 1)) - state.done))
    if not missing:
        state.remove()
    return Joined(missing, first.count, tuple(faults))


def report(joined: Joined, to: Path) -> list[str]:
    """What a person is told after joining."""
    lines = list(joined.faults)
    if joined.missing:
        numbers = ", ".join(str(number) for number in joined.missing)
        plural = "piece" if len(joined.missing) == 1 else "pieces"
        lines.append(
            f"still missing: {plural} {numbers} of {joined.count}; run join again with {plural} {numbers} and the "
            f"same --to '{to}'"
        )
    else:
        lines.append(f"all {joined.count} pieces are in '{to}'; next: python3 '{to}/install.py' --prefix FOLDER")
    return lines


def _pieces_in(places: Sequence[Path]) -> list[Path]:
    """The given folders, or the pieces that lie in them."""
    found: list[Path] = []
    for place in places:
        inside = [place] if (place / PIECE).is_file() else sorted(file.parent for file in place.glob(f"*/{PIECE}"))
        if not inside:
            raise BundleError(f"'{place}' is no piece of a bundle and holds none: there is no {PIECE}; check the path")
        found += inside
    return list(dict.fromkeys(found))


def _read_piece(place: Path) -> _Piece:
    try:
        expected = (place / PIECE_SUM).read_text(encoding="utf-8").split()[0]
        if sums_of(place / PIECE, blocks=False).sha256 != expected:
            raise ValueError("its checksum differs")
        record: dict[str, Any] = json.loads((place / PIECE).read_text(encoding="utf-8"))
        slices = []
        for each in record["slices"]:
            sha256 = each.pop("sha256")
            if not is_inside(each["path"]):
                raise ValueError("it names a path outside of the bundle")
            slices.append((Slice(**each), sha256))
        return _Piece(place, record["bundle"], record["name"], record["number"], record["count"], tuple(slices))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise BundleError(f"'{place / PIECE}' is damaged ({error}); copy this piece again") from None


def _join_piece(piece: _Piece, to: Path) -> str | None:
    """Why the piece is not right, or None."""
    require_space(to, sum(part.n_bytes for part, _ in piece.slices), f"piece {piece.number}")
    for index, (part, sha256) in enumerate(piece.slices, 1):
        source = piece.place / SLICES / f"{index:04d}"
        try:
            if source.stat().st_size != part.n_bytes:
                raise EOFError(f"it has {source.stat().st_size:,} bytes, but must have {part.n_bytes:,}")
            found = _copy_slice(source, 0, to / part.path, part.offset, part.n_bytes)
        except FileNotFoundError:
            return f"piece {piece.number} lacks {SLICES}/{index:04d} (of {part.path}); copy '{piece.place}' again"
        except (OSError, EOFError) as error:
            return f"piece {piece.number}: {SLICES}/{index:04d} cannot be used: {error}; copy '{piece.place}' again"
        if found != sha256:
            return f"piece {piece.number}: {SLICES}/{index:04d} (of {part.path}) is damaged; copy '{piece.place}' again"
    return None


class _JoinState:
    """Which pieces are in; in the folder itself, so that disks may come on different days."""

    def __init__(self, to: Path, piece: _Piece) -> None:
        self._path = to / JOIN_STATE
        self._bundle, self._count = piece.bundle, piece.count
        self.done: set[int] = set()
        if to.exists() and not to.is_dir():
            raise BundleError(f"'{to}' is a file; give --to a folder")
        if self._path.is_file():
            self._read(to, piece)
        elif (to / SEAL).is_file() and sums_of(to / SEAL, blocks=False).sha256 == piece.bundle:
            raise BundleError(f"'{to}' is this bundle already, whole; `bundle verify` checks it")
        elif to.is_dir() and any(to.iterdir()):
            raise BundleError(f"'{to}' holds other things; give --to a folder that is empty or new")
        to.mkdir(parents=True, exist_ok=True)
        self._write()

    def _read(self, to: Path, piece: _Piece) -> None:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            bundle, count, done = record["bundle"], record["count"], record["done"]
        except (OSError, ValueError, KeyError, TypeError):
            bundle, count, done = piece.bundle, piece.count, []  # it was cut off while being written: begin anew
        if (bundle, count) != (piece.bundle, piece.count):
            raise BundleError(f"'{to}' holds pieces of another bundle or split; give --to another folder")
        self.done = set(done)

    def add(self, number: int) -> None:
        self.done.add(number)
        self._write()

    def _write(self) -> None:
        part = self._path.with_name(JOIN_STATE + ".part")
        record = {"bundle": self._bundle, "count": self._count, "done": sorted(self.done)}
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def main() -> int:
    """What join.py of a piece runs: `python3 join.py --to FOLDER PIECE…`; without PIECE the one that it lies in."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(prog="join.py", description="Put pieces of a bundle together. No network.")
    parser.add_argument("--to", type=Path, required=True, help="folder that becomes the bundle")
    parser.add_argument("pieces", nargs="*", type=Path, help="folders of pieces, or folders that hold some")
    given = parser.parse_args()
    try:
        joined = join(given.pieces or [Path(sys.argv[0]).absolute().parent], given.to, say=print)
    except BundleError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code
    sys.stdout.write("\n".join(report(joined, given.to)) + "\n")
    return BundleError.exit_code if joined.missing else 0
