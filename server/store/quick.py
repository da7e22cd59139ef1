"""The checks of every start: what headers, names and sizes tell about a model's files, without reading the weights.

`inspect_model` finds everything that is wrong with the set of shards that a file belongs to; a server starts only when
that is nothing, and `verify` goes on from there to the weights. Milliseconds for a set of eleven shards: headers are
read, holes asked for, and sizes compared with what `fetch` has recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.errors import ModelFileError
from server.gguf import MAGIC, Header, read_header
from server.store.faults import REFETCHED, Fault, FaultKind, unreadable
from server.store.holes import WeightMap, file_holes, is_shape, vocabulary_size, zero_faults
from server.store.manifest import find_record
from server.store.shards import missing_fault, numbering_fault, set_faults, siblings
from server.store.sniff import what_it_is


@dataclass(frozen=True, slots=True)
class Inspection:
    """`shards` are all of the set by name; a header is None where it could not be read."""

    shards: tuple[Path, ...]
    headers: tuple[Header | None, ...]
    faults: tuple[Fault, ...]


def inspect_model(file: Path, *, shapes: bool = True) -> Inspection:
    """Look at the set of shards that `file` belongs to. `shapes`: files that are one hole from the header on are no
    fault, since they were made so (a plan needs no weights). Raises nothing: what cannot be read is a fault."""
    impossible = numbering_fault(file)
    if impossible:
        return Inspection((file,), (None,), (impossible,))
    shards = siblings(file)
    faults: list[Fault] = []
    missing = missing_fault(shards)
    if missing:
        faults.append(missing)
    headers: list[Header | None] = []
    for shard in shards:
        header, fault = _read(shard) if missing is None or shard.is_file() else (None, None)
        headers.append(header)
        if fault:
            faults.append(fault)
    faults += set_faults(shards, headers)
    kind = _kind_fault(shards[0], headers)
    if kind:
        faults.append(kind)
    faults += size_faults(shards)
    if not faults:
        faults += _hole_faults(shards, headers, shapes)
    return Inspection(shards, tuple(headers), tuple(with_repair(fault) for fault in faults))


def size_faults(files: Sequence[Path]) -> Iterator[Fault]:
    """Sizes against the manifest of what was fetched."""
    for file in files:
        found = find_record(file)
        if found is None or not file.is_file():
            continue
        size = file.stat().st_size
        if size != found.record.size_bytes:
            yield wrong_size(file, size, found.record.size_bytes, found.files.hub_name or "its source")


def wrong_size(file: Path, size: int, told: int, source: str) -> Fault:
    """`source`: who told it."""
    cause = f"'{file}' has {size:,} bytes, but by {source} it should have {told:,}"
    return Fault(FaultKind.WRONG_SIZE, file, cause, "it was cut or changed: fetch it again", min(size, told))


def with_repair(fault: Fault) -> Fault:
    """Where it is known what the file was fetched from, the way out is a command."""
    found = find_record(fault.file) if fault.kind in REFETCHED else None
    command = found.repair_command if found else None
    return fault.with_remedy(f"run: {command}") if command else fault


def _read(file: Path) -> tuple[Header | None, Fault | None]:
    """The header of one file, and what is wrong with the file alone."""
    try:
        stray = what_it_is(file)
        if stray:
            return None, Fault(stray.kind, file, f"'{file}' is {stray.what}", stray.remedy, 0)
        header = read_header(file)
        return header, _length_fault(file, header)
    except OSError as error:
        return None, unreadable(file, error)
    except ModelFileError as error:
        cause, _, remedy = error.message.rpartition("; ")
        return None, Fault(FaultKind.DAMAGED_HEADER, file, cause or error.message, remedy)


def _length_fault(file: Path, header: Header) -> Fault | None:
    """Too short for its tensors, or with another file behind them."""
    if header.data_end > header.file_bytes:
        cause = (
            f"'{file}' is cut short: its tensors end at byte {header.data_end:,}, but the file has "
            f"{header.file_bytes:,} ({100 * header.file_bytes // header.data_end} %)"
        )
        remedy = "finish or repeat the download"
        return Fault(FaultKind.TRUNCATED, file, cause, remedy, header.file_bytes, header.data_end)
    at = _next_gguf(file, header)
    if at is None:
        return None
    return Fault(
        FaultKind.CONCATENATED,
        file,
        f"'{file}' is several GGUF files in one: the first ends at byte {at:,}, where another begins, "
        f"which llama.cpp does not read",
        "give it the shards under their own names (NAME-00001-of-00009.gguf), or join them with "
        "llama-gguf-split --merge, never with cat",
        at,
    )


def _next_gguf(file: Path, header: Header) -> int | None:
    """Where another GGUF begins behind the last tensor, with padding in between or without."""
    end = max(header.data_end, header.data_offset)
    padded = -(-end // header.alignment) * header.alignment
    if header.file_bytes < end + len(MAGIC):
        return None
    with open(file, "rb") as data:
        for at in sorted({end, padded}):
            data.seek(at)
            if data.read(len(MAGIC)) == MAGIC:
                return at
    return None


def _kind_fault(file: Path, headers: Sequence[Header | None]) -> Fault | None:
    """Other things are stored as GGUF too. Only the first shard says what it is."""
    header = headers[0]
    if header is None:
        return None
    kind = header.text("general.type") or "model"
    if kind != "model":
        cause, remedy = f"is of type '{kind}' by its own header, not a model", "give the model's file"
    elif header.architecture is None:
        cause, remedy = "does not name its architecture (general.architecture)", "fetch the model again"
    elif header.architecture == "clip":
        cause, remedy = "is an image projector (mmproj), not a language model", "give the model's file"
    elif not any(each.tensors if each else True for each in headers):
        cause, remedy = "holds a vocabulary and no tensors", "give the file that has the weights"
    else:
        return None
    return Fault(FaultKind.NOT_A_MODEL, file, f"'{file}' {cause}", remedy)


def _hole_faults(shards: Sequence[Path], headers: Sequence[Header | None], shapes: bool) -> Iterator[Fault]:
    n_vocab = vocabulary_size(headers[0]) if headers[0] else None
    for shard, header in zip(shards, headers, strict=True):
        if header is None:
            continue
        try:
            holes = file_holes(shard)
        except OSError as error:
            yield unreadable(shard, error)
            continue
        if not holes:
            continue
        weights = WeightMap(header, n_vocab)
        if not shapes or not is_shape(weights, holes):
            yield from zero_faults(shard, weights, holes, FaultKind.HOLE)
