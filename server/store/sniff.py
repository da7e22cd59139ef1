"""Says what a file that is no GGUF is instead, from its first bytes: the usual accidents of downloads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.store.faults import FaultKind

_SNIFF_BYTES = 512

_STARTS: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint", "unpack it, or fetch the model's GGUF files"),
    (b"\x1f\x8b", "gzip-compressed", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "unpack it first"),
    (b"\xfd7zXZ\x00", "xz-compressed", "unpack it first"),
    (b"BZh", "bzip2-compressed", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"FUGG", "a GGUF file with its bytes in big-endian order", "fetch a little-endian one"),
    (b"lmgg", "a GGML file from before GGUF", "fetch the model's GGUF files"),
    (b"fmgg", "a GGMF file from before GGUF", "fetch the model's GGUF files"),
    (b"tjgg", "a GGJT file from before GGUF", "fetch the model's GGUF files"),
    (b"\x80\x02", "a pickled PyTorch checkpoint", "fetch the model's GGUF files"),
    (b"\x89HDF", "an HDF5 file", "fetch the model's GGUF files"),
)


@dataclass(frozen=True, slots=True)
class Stray:
    """`what` completes "'model.gguf' is …"."""

    kind: FaultKind
    what: str
    remedy: str


def what_it_is(path: Path) -> Stray | None:
    """None if the file starts as a GGUF does. May raise OSError."""
    with open(path, "rb") as file:
        start = file.read(_SNIFF_BYTES)
    if start[:4] == b"GGUF":
        return None
    if not start:
        return Stray(FaultKind.TRUNCATED, "empty", "fetch it again")
    if start.startswith(b"version https://git-lfs"):
        return _pointer(start)
    for magic, what, remedy in _STARTS:
        if start.startswith(magic):
            return Stray(FaultKind.NOT_A_MODEL, what, remedy)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        what = "a web page, probably the error or login page of a failed download"
        return Stray(FaultKind.WEB_PAGE, what, "fetch the file itself")
    if len(start) > 9 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30:
        remedy = "this server reads GGUF files only, so convert the model or fetch its GGUF files"
        return Stray(FaultKind.NOT_A_MODEL, "a safetensors file", remedy)
    if text.startswith((b"{", b"[")):
        return Stray(FaultKind.NOT_A_MODEL, "JSON text, not a model", "fetch the file itself")
    if not any(start):
        return Stray(FaultKind.ZEROS, "filled with zeros at its start, as an unfinished download is", "fetch it again")
    what = f"no GGUF file, for it starts with {start[:8]!r} instead of b'GGUF'"
    return Stray(FaultKind.NOT_A_MODEL, what, "give the path of a .gguf file")


def _pointer(start: bytes) -> Stray:
    """A pointer tells the size of the file that it stands for."""
    size = re.search(rb"^size (\d{1,18})$", start, re.MULTILINE)
    of_size = f" of {int(size[1]):,} bytes" if size else ""
    return Stray(
        FaultKind.LFS_POINTER,
        f"a Git LFS pointer, not the model file{of_size} itself",
        "run 'git lfs pull' in its folder, or fetch the file",
    )
