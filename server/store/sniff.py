"""Says what a file that is no GGUF is instead, from its first bytes: the usual accidents of downloads."""

from __future__ import annotations

from pathlib import Path

_SNIFF_BYTES = 512

_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself; run 'git lfs pull' in its folder"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint; unpack it, or fetch the model's GGUF files"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (b"\xfd7zXZ\x00", "xz-compressed; unpack it first"),
    (b"BZh", "bzip2-compressed; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"FUGG", "a GGUF file with its bytes in big-endian order; fetch a little-endian one"),
    (b"lmgg", "a GGML file from before GGUF; fetch the model's GGUF files"),
    (b"fmgg", "a GGMF file from before GGUF; fetch the model's GGUF files"),
    (b"tjgg", "a GGJT file from before GGUF; fetch the model's GGUF files"),
    (b"\x80\x02", "a pickled PyTorch checkpoint; fetch the model's GGUF files"),
    (b"\x89HDF", "an HDF5 file; fetch the model's GGUF files"),
)


def what_it_is(path: Path) -> str | None:
    """A phrase that completes "'model.gguf' is ...", or None if the file starts as a GGUF does. May raise OSError."""
    with open(path, "rb") as file:
        start = file.read(_SNIFF_BYTES)
    if start[:4] == b"GGUF":
        return None
    if not start:
        return "empty; fetch it again"
    for magic, phrase in _STARTS:
        if start.startswith(magic):
            return phrase
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "a web page, probably the error or login page of a failed download; fetch the file itself"
    if len(start) > 9 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30:
        return "a safetensors file; this server reads GGUF files only, so convert the model or fetch its GGUF files"
    if text.startswith((b"{", b"[")):
        return "JSON text, not a model; fetch the file itself"
    if not any(start):
        return "filled with zeros at its start, as an unfinished download is; fetch it again"
    return f"no GGUF file, for it starts with {start[:8]!r} instead of b'GGUF'; give the path of a .gguf file"
