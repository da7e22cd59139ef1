"""The file of a saved state: a header of 128 bytes, the tokens of its path, the state as llama.cpp gave it.

Little endian:
  magic "GLMSTATE"; u32 version; u32 number of tokens; u32 first token that the state holds; u32 zero; u64 bytes of the
  state; 16 bytes that stand for the model, 16 for the settings of its cache (engine/identity.py); SHA-256 of the state;
  SHA-256 of all this and the tokens; then the tokens, u32 each; then the state.
A file is exactly as long as that. It appears by a rename, complete and synced, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.engine.backend import State
from server.engine.identity import Identity

MAGIC = b"GLMSTATE"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIQ16s16s32s")
_DIGEST_BYTES = 32
HEADER_BYTES = _HEADER.size + _DIGEST_BYTES
_TOKEN_BYTES = 4
_MOST_TOKENS = 1 << 27
_CHUNK_BYTES = 16 << 20
TEMPORARY = ".tmp"


class StateFileError(Exception):
    """The file cannot be used; the message says why, and completes a sentence that begins with the file's name."""


class Damaged(StateFileError):
    """Not what was written once."""


class Foreign(StateFileError):
    """Whole, but of another model, other settings or another version."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says about itself. The state holds the tokens from `start` on."""

    identity: Identity
    tokens: array[int]
    start: int
    n_state_bytes: int
    state_digest: bytes

    @property
    def n_bytes(self) -> int:
        return file_bytes(len(self.tokens), self.n_state_bytes)


def file_bytes(n_tokens: int, n_state_bytes: int) -> int:
    return HEADER_BYTES + _TOKEN_BYTES * n_tokens + n_state_bytes


def write(path: Path, identity: Identity, tokens: Sequence[int], start: int, state: State) -> int:
    """Write the file and sync it. Its size in bytes. Raises OSError, and leaves nothing then."""
    numbers = array("I", tokens)
    digest = hashlib.sha256(state.data).digest()
    fixed = _HEADER.pack(
        MAGIC, VERSION, len(numbers), start, 0, state.nbytes, identity.model, identity.settings, digest
    )
    head = fixed + hashlib.sha256(fixed + _bytes(numbers)).digest() + _bytes(numbers)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for data in (memoryview(head), state.data):
                for at in range(0, len(data), _CHUNK_BYTES):
                    _write_all(file.fileno(), data[at : at + _CHUNK_BYTES])
            os.fsync(file.fileno())
            _forget_pages(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return file_bytes(len(numbers), state.nbytes)


def read_head(path: Path, identity: Identity | None) -> Head:
    """Header and tokens; the state is not looked at. `identity`: what it must be of. Raises StateFileError, OSError."""
    descriptor = _open(path)
    try:
        return _head(descriptor, identity)
    finally:
        os.close(descriptor)


def read(path: Path, identity: Identity) -> tuple[Head, State]:
    """The whole file, every byte of it checked. Raises StateFileError, OSError."""
    descriptor = _open(path)
    try:
        head = _head(descriptor, identity)
        state = np.empty(head.n_state_bytes, dtype=np.uint8)
        sha256 = hashlib.sha256()
        view = state.data
        offset = HEADER_BYTES + _TOKEN_BYTES * len(head.tokens)
        for at in range(0, len(view), _CHUNK_BYTES):
            chunk = view[at : at + _CHUNK_BYTES]
            _read_all(descriptor, chunk, offset + at)
            sha256.update(chunk)
        _forget_pages(descriptor)
        if sha256.digest() != head.state_digest:
            raise Damaged("its state is not the one that was saved (checksum)")
        return head, state
    finally:
        os.close(descriptor)


def _head(descriptor: int, identity: Identity | None) -> Head:
    size = os.fstat(descriptor).st_size
    if size < HEADER_BYTES:
        raise Damaged(f"it has {size} bytes, less than a header")
    raw = bytearray(HEADER_BYTES)
    _read_all(descriptor, memoryview(raw), 0)
    magic, version, n_tokens, start, zero, n_state, model, settings, state_digest = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise Damaged("it does not begin like a saved state")
    if version != VERSION:
        raise Foreign(f"it has format version {version}, and this server reads {VERSION}; save it anew")
    if zero or n_tokens > _MOST_TOKENS or start >= max(n_tokens, 1) or size != file_bytes(n_tokens, n_state):
        raise Damaged(f"its {size} bytes are not what its header says")
    tokens = array("I", bytes(_TOKEN_BYTES * n_tokens))
    _read_all(descriptor, memoryview(tokens).cast("B"), HEADER_BYTES)
    digest = hashlib.sha256(raw[: _HEADER.size])
    digest.update(_bytes(tokens))
    if digest.digest() != raw[_HEADER.size :]:
        raise Damaged("its header or its tokens are not those that were saved (checksum)")
    made_by = Identity(model, settings)
    difference = identity.difference(made_by) if identity is not None else None
    if difference is not None:
        raise Foreign(difference)
    return Head(made_by, tokens, start, n_state, state_digest)


def _open(path: Path) -> int:
    """A plain file; a link is not followed, and a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged("it is no plain file")
    return descriptor


def _read_all(descriptor: int, into: memoryview, offset: int) -> None:
    while len(into):
        n_bytes = os.preadv(descriptor, [into], offset)
        if not n_bytes:
            raise Damaged("it became shorter while it was read")
        into = into[n_bytes:]
        offset += n_bytes


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def _bytes(numbers: array[int]) -> bytes:
    return numbers.tobytes()


def _forget_pages(descriptor: int) -> None:
    """The page cache is better used for weights."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
