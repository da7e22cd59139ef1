"""Shards of one model: what their names say, what their headers say, and whether the two agree.

llama.cpp finds the shards by their names, NAME-00001-of-00009.gguf. In the names they are numbered from 1, in their
headers (`split.no`) from 0; `split.count` and `split.tensors.count`, the number of tensors of all shards together,
stand in every header; the architecture and the vocabulary only in the first one's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.gguf import Header
from server.store.faults import Fault, FaultKind

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)

# What programs call a file that they are still getting; the name of the finished one is in front.
UNFINISHED_ENDINGS = (".part", ".incomplete", ".partial", ".aria2", ".crdownload", ".download", ".tmp")


@dataclass(frozen=True, slots=True)
class ShardName:
    """`number` counts from 1."""

    stem: str
    number: int
    count: int
    ending: str

    def of(self, number: int) -> str:
        return f"{self.stem}-{number:05d}-of-{self.count:05d}{self.ending}"


def shard_name(file: Path) -> ShardName | None:
    match = _SHARD.fullmatch(file.name)
    return ShardName(match["stem"], int(match["number"]), int(match["count"]), match["ending"]) if match else None


def model_name(file: Path) -> str:
    """The file's name without folder, shard number and ending."""
    name = shard_name(file)
    return name.stem if name else re.sub(r"\.gguf$", "", file.name, flags=re.IGNORECASE)


def is_model_file(file: Path) -> bool:
    """By its name. Projectors and importance matrices are .gguf files too, but no models."""
    name = file.name.lower()
    return name.endswith(".gguf") and "mmproj" not in name and "imatrix" not in name and not file.is_dir()


def siblings(file: Path) -> tuple[Path, ...]:
    """All shards of the set that a file belongs to by its name, there or not, in order."""
    name = shard_name(file)
    if name is None or name.count == 0:
        return (file,)
    return tuple(file.with_name(name.of(number)) for number in range(1, name.count + 1))


def numbering_fault(file: Path) -> Fault | None:
    name = shard_name(file)
    if name is None or 1 <= name.number <= name.count:
        return None
    return Fault(
        FaultKind.SHARD_NUMBER,
        file,
        f"'{file}' calls itself shard {name.number} of {name.count}, but shards are numbered from 1 to their count",
        "give the files their own names back",
    )


def missing_fault(shards: Sequence[Path]) -> Fault | None:
    missing = [number for number, shard in enumerate(shards, 1) if not shard.is_file()]
    if not missing:
        return None
    first = shards[missing[0] - 1]
    cause = (
        f"of the {len(shards)} shards of '{model_name(shards[0])}' in '{first.parent}', {spans(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing"
    )
    remedy = "put all shards of one set into one folder"
    unfinished = [part for number in missing for part in unfinished_files(shards[number - 1])]
    if unfinished:
        cause += f", and '{unfinished[0].name}' is an unfinished download"
        remedy = "finish the download"
    return Fault(FaultKind.MISSING, first, cause, remedy)


def unfinished_files(file: Path) -> list[Path]:
    """What downloads of a file have left beside it."""
    named = (file.with_name(file.name + ending) for ending in UNFINISHED_ENDINGS)
    return [part for part in named if part.is_file()]


def set_faults(shards: Sequence[Path], headers: Sequence[Header | None]) -> Iterator[Fault]:
    """What is wrong between the shards of a set. A header is None where it could not be read."""
    wrong_numbers = list(_number_faults(shards, headers))
    yield from wrong_numbers
    known = [(shard, header) for shard, header in zip(shards, headers, strict=True) if header is not None]
    if len(shards) == 1 or wrong_numbers or not known:
        return
    mixed = _mixed_fault(known)
    if mixed:
        yield mixed
        return
    told_tensors = known[0][1].integer("split.tensors.count")
    n_tensors = sum(len(header.tensors) for _, header in known)
    if told_tensors is not None and len(known) == len(shards) and told_tensors != n_tensors:
        yield Fault(
            FaultKind.MIXED_SETS,
            shards[0],
            f"the {len(shards)} shards of '{shards[0]}' hold {n_tensors:,} tensors, but the set should hold "
            f"{told_tensors:,}",
            "they are not of one set: fetch all shards from one source",
        )


def _number_faults(shards: Sequence[Path], headers: Sequence[Header | None]) -> Iterator[Fault]:
    """What the files' names say about the set must be what their headers say."""
    count = len(shards)
    for index, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        if header is None:
            continue
        told_index, told_count = _told(header)
        if (told_index, told_count) == (index, count):
            continue
        told = f"shard {told_index + 1} of {told_count}" if told_count > 1 else "a whole model"
        named = f"shard {index + 1} of {count}" if count > 1 else "a whole model"
        rightful = headers[told_index] if told_count == count and told_index < count else None
        if rightful is not None and _told(rightful) == (told_index, count):
            yield Fault(
                FaultKind.DUPLICATE_SHARD,
                shard,
                f"'{shard}' is a second copy of {told}, which '{shards[told_index].name}' is already, "
                f"though its name says {named}",
                f"fetch {named} in its place",
            )
            continue
        yield Fault(
            FaultKind.SHARD_NUMBER,
            shard,
            f"'{shard}' is {told} by its own header, but {named} by its name",
            "llama.cpp finds shards by their names (NAME-00001-of-00009.gguf), so give the file its own name back "
            "or fetch the set again",
        )


def _told(header: Header) -> tuple[int, int]:
    return header.integer("split.no") or 0, header.integer("split.count") or 1


def _mixed_fault(known: Sequence[tuple[Path, Header]]) -> Fault | None:
    """Shards of two quants, or of two conversions: they disagree about the whole, or hold the same tensor twice."""
    remedy = "they are of different sets, of two quants perhaps: fetch all shards from one source"
    first, told_first = known[0][0], known[0][1].integer("split.tensors.count")
    owners: dict[str, Path] = {}
    for shard, header in known:
        told = header.integer("split.tensors.count")
        if told != told_first and told is not None and told_first is not None:
            cause = f"'{shard}' belongs to a set of {told:,} tensors, but '{first.name}' to one of {told_first:,}"
            return Fault(FaultKind.MIXED_SETS, shard, cause, remedy)
        for tensor in header.tensors:
            owner = owners.setdefault(tensor.name, shard)
            if owner is not shard:
                cause = f"'{shard}' holds the tensor {tensor.name}, which '{owner.name}' holds already"
                byte = header.data_offset + tensor.offset
                return Fault(FaultKind.MIXED_SETS, shard, f"{cause} (byte {byte:,})", remedy, byte)
    return None


def spans(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 → "numbers 1 to 3 and 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"number {listed}" if single else f"numbers {listed}"
