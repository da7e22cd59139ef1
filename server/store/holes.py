"""Zeros where weights should be. A download that was interrupted after the file had been given its full length leaves
them: as holes, where the file system has nothing at all, or as written zeros, once the file has been copied.

Weights are never zero for long stretches, but for one case: rows of a vocabulary that no token uses. Tensors with a row
for each token are therefore left out. Spans are (start, end) in bytes of the file, the end exclusive.
"""

from __future__ import annotations

import bisect
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from server.gguf import ArrayRef, Header, TensorInfo
from server.store.faults import Fault, FaultKind

LEAST_BYTES = 64 << 10  # of zeros in one tensor; smaller tensors (biases, norms) may well be zero

Span = tuple[int, int]


class WeightMap:
    """Which tensor lies at which byte of a file. `n_vocab` is that of the set: only the first shard knows it."""

    def __init__(self, header: Header, n_vocab: int | None) -> None:
        ranges = []
        for tensor in header.tensors:
            start = header.data_offset + tensor.offset
            if tensor.n_bytes and n_vocab not in tensor.shape:
                ranges.append((start, start + tensor.n_bytes, tensor))
        self._ranges = sorted(ranges, key=lambda entry: entry[0])
        self._starts = [start for start, _, _ in self._ranges]

    @property
    def n_bytes(self) -> int:
        return sum(end - start for start, end, _ in self._ranges)

    def within(self, span: Span) -> Iterator[tuple[int, int, TensorInfo]]:
        """The parts of a span that lie in weights, each with its tensor."""
        at = max(0, bisect.bisect_right(self._starts, span[0]) - 1)
        for start, end, tensor in self._ranges[at:]:
            if start >= span[1]:
                return
            if end > span[0]:
                yield max(start, span[0]), min(end, span[1]), tensor


def vocabulary_size(header: Header) -> int | None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return tokens.count if isinstance(tokens, ArrayRef) else None


def file_holes(path: Path) -> list[Span]:
    """What the file system never wrote, without reading the file. None where it cannot tell. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        spans: list[Span] = []
        at = 0
        while at < size:
            start = os.lseek(fd, at, os.SEEK_HOLE)
            if start >= size:
                break
            try:
                at = os.lseek(fd, start, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no data behind the hole
                    raise
                at = size
            spans.append((start, at))
        return spans
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return []
        raise
    finally:
        os.close(fd)


def is_shape(weights: WeightMap, holes: Sequence[Span]) -> bool:
    """A file without any weights, made to try out what its sizes do: no download leaves one hole behind a header."""
    inside = sum(end - start for start, end, _ in weights.within(holes[0]))
    return len(holes) == 1 and inside > weights.n_bytes - LEAST_BYTES


def zero_faults(path: Path, weights: WeightMap, spans: Iterable[Span], kind: FaultKind) -> Iterator[Fault]:
    """One fault for a file, at the first zeros that matter, with the sum of them all."""
    found = [
        (start, end, tensor)
        for span in spans
        for start, end, tensor in weights.within(span)
        if end - start >= LEAST_BYTES
    ]
    if not found:
        return
    start, end, tensor = found[0]
    total = sum(end - start for start, end, _ in found)
    is_hole = kind is FaultKind.HOLE
    what = "were never written (a hole in the file)" if is_hole else "are all zero"
    cause = f"'{path}' is not complete: bytes {start:,} to {end - 1:,}, in the tensor {tensor.name}, {what}"
    if len(found) > 1:
        cause += f", and with {len(found) - 1} more such places {total:,} bytes"
    cause += ", as an interrupted download leaves them"
    remedy = "finish or repeat the download"
    if is_hole:
        remedy += " (where zeros are meant, copy the file with cp --sparse=never)"
    yield Fault(kind, path, cause, remedy, start, found[-1][1])
