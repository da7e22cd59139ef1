"""A bundle's folder as a bag (BagIt 1.0, RFC 8493): its manifests, and the check of every byte.

Standard library only: a bundle carries this module, so that a machine with nothing but Python can check what arrived.

    data/…                    what is carried; manifest-sha256.txt has a line for each file
    everything beside data/   tag files; tagmanifest-sha256.txt has a line for each
    seal-sha256.txt           the checksum of tagmanifest-sha256.txt, so that damage to that file can be told from
                              damage to the files that it lists
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from server.errors import BundleError

PAYLOAD = "data"
MANIFEST = "manifest-sha256.txt"
TAG_MANIFEST = "tagmanifest-sha256.txt"
SEAL = "seal-sha256.txt"
BAGIT = "bagit.txt"
BAG_INFO = "bag-info.txt"
STATE = ".verify-state.jsonl"
SIGNATURE = "bundle.sig"  # made last, so no manifest knows it

BLOCK_BYTES = 64 << 20  # files are damaged in places; a block is what has to be copied again
_READ_BYTES = 1 << 20  # at most a block
_OUTSIDE = frozenset({TAG_MANIFEST, SEAL, STATE, SIGNATURE})
_HEX = frozenset("0123456789abcdef")

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that is not what it was. `what` completes a sentence that begins with the path."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


@dataclass(slots=True)
class Checked:
    n_files: int = 0
    n_bytes: int = 0
    n_resumed: int = 0  # files that an earlier, interrupted check had already read
    faults: list[Fault] = field(default_factory=list)


# ── checksums ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Sums:
    """`blocks`: CRC-32 of each block of BLOCK_BYTES; they only say where a file is damaged."""

    n_bytes: int
    sha256: str
    blocks: tuple[int, ...]


def sums_of(path: Path, on_bytes: OnBytes | None = None, *, blocks: bool = True) -> Sums:
    digest, crcs, crc, n_bytes = hashlib.sha256(), [], 0, 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            part = buffer[:n]
            digest.update(part)
            if blocks:
                split = min(n, BLOCK_BYTES - n_bytes % BLOCK_BYTES)
                crc = zlib.crc32(part[:split], crc)
                if (n_bytes + split) % BLOCK_BYTES == 0:
                    crcs.append(crc)
                    crc = zlib.crc32(part[split:])
            n_bytes += n
            if on_bytes is not None:
                on_bytes(n)
    if blocks and n_bytes % BLOCK_BYTES:
        crcs.append(crc)
    return Sums(n_bytes, digest.hexdigest(), tuple(crcs))


def workers() -> int:
    """Threads to hash with: hashing is as fast as a core, and disks are faster than four of them."""
    return max(1, min(4, os.cpu_count() or 1))


# ── manifests ────────────────────────────────────────────────────────────────────────────────────────────────────────


def manifest_text(sha256_of: dict[str, str]) -> str:
    return "".join(f"{sha256_of[path]}  {_quoted(path)}\n" for path in sorted(sha256_of))


def read_manifest(text: str) -> dict[str, str]:
    """SHA-256 by path. Raises ValueError for what is no manifest."""
    found: dict[str, str] = {}
    lines = text.split("\n")
    if lines.pop():
        raise ValueError("the last line is not whole")
    for number, line in enumerate(lines, 1):
        sha256, gap, path = line.partition("  ")
        if not gap or len(sha256) != 64 or not _HEX.issuperset(sha256):
            raise ValueError(f"line {number} is no checksum and path")
        path = _unquoted(path)
        if not is_inside(path):
            raise ValueError(f"line {number} names a path outside of the bundle")
        found[path] = sha256
    return found


def _text(path: Path) -> str:
    """As it is: reading as text would take a damaged line end for a line end. Raises OSError, ValueError."""
    return path.read_bytes().decode("utf-8")


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("\n", "%0A").replace("\r", "%0D")


def _unquoted(path: str) -> str:
    for code, char in (("%0A", "\n"), ("%0a", "\n"), ("%0D", "\r"), ("%0d", "\r"), ("%25", "%")):
        path = path.replace(code, char)
    return path


def is_inside(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")


def files_below(folder: Path) -> Iterator[str]:
    """Every file of a folder by its path with slashes; links to files count, links to folders do not lead on."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield (Path(parent) / name).relative_to(folder).as_posix()


def seal(folder: Path, sums: dict[str, Sums], info: dict[str, str]) -> None:
    """Write the manifests of a folder whose data/ is complete; `sums` has every file of it (paths begin with data/)."""
    n_bytes = sum(each.n_bytes for each in sums.values())
    _write(folder / BAGIT, "BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n")
    info = {**info, "Payload-Oxum": f"{n_bytes}.{len(sums)}"}
    _write(folder / BAG_INFO, "".join(f"{key}: {value}\n" for key, value in info.items()))
    _write(folder / MANIFEST, manifest_text({path: each.sha256 for path, each in sums.items()}))
    tags = {path: sums_of(folder / path, blocks=False).sha256 for path in _tag_files(folder)}
    _write(folder / TAG_MANIFEST, manifest_text(tags))
    _write(folder / SEAL, manifest_text({TAG_MANIFEST: sums_of(folder / TAG_MANIFEST, blocks=False).sha256}))


def _tag_files(folder: Path) -> list[str]:
    return [path for path in files_below(folder) if not path.startswith(f"{PAYLOAD}/") and not _is_outside(path)]


def _is_outside(path: str) -> bool:
    """Python writes bytecode beside the bundle's own scripts when they run; no harm is in that."""
    return path in _OUTSIDE or "__pycache__/" in path


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# ── the check ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Known:
    """What the bundle's description knows of its files beyond their checksum: how to say where damage is."""

    n_bytes: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Verification:
    """The check of one bundle. The steps are apart because the second one needs the bundle's own description, which is
    worth reading only once the first one has passed."""

    def __init__(self, folder: Path, *, trust_finished: bool = False) -> None:
        """`trust_finished`: take what an earlier, complete check has read, as long as size, times and inode of a file
        are the same. Otherwise only an interrupted check is gone on with."""
        if not folder.is_dir():
            raise BundleError(f"there is no bundle '{folder}': no such folder; check the path")
        if not (folder / BAGIT).is_file() and not (folder / MANIFEST).is_file():
            raise BundleError(
                f"'{folder}' is no bundle: it has neither {BAGIT} nor {MANIFEST}; give the folder that holds data/"
            )
        self._folder = folder
        self._state = _State(folder, trust_finished=trust_finished)
        self.checked = Checked()

    def check_tags(self) -> bool:
        """Check everything beside data/. False, with faults, when something of it is damaged."""
        folder, faults = self._folder, self.checked.faults
        try:
            manifest = read_manifest(_text(folder / TAG_MANIFEST))
        except (OSError, ValueError) as error:
            # it lists the other files, so nothing can be said of them before it is right
            faults.append(Fault(TAG_MANIFEST, _MISSING if isinstance(error, FileNotFoundError) else _DIFFERS))
            return False
        found = set(_tag_files(folder))
        wrong = [Fault(path, _MISSING) for path in sorted(set(manifest) - found)]
        wrong += [fault for path in sorted(set(manifest) & found) if (fault := self._tag_fault(path, manifest[path]))]
        seal = self._seal_fault()
        if seal is not None:
            # one of the two is damaged: the list, if files differ from it, or else the seal
            faults.append(Fault(TAG_MANIFEST, _DIFFERS) if wrong else seal)
            return False
        faults += wrong
        faults += [Fault(path, _FOREIGN) for path in sorted(found - set(manifest))]
        self.checked.n_files += len(manifest)
        return not faults

    def _tag_fault(self, path: str, sha256: str) -> Fault | None:
        sums = _readable_sums(self._folder, path)
        if isinstance(sums, Fault):
            return sums
        return None if sums.sha256 == sha256 else Fault(path, _DIFFERS)

    def _seal_fault(self) -> Fault | None:
        try:
            sealed = read_manifest(_text(self._folder / SEAL))
        except FileNotFoundError:
            return Fault(SEAL, _MISSING)
        except (OSError, ValueError):
            return Fault(SEAL, _DIFFERS)
        sums = sums_of(self._folder / TAG_MANIFEST, blocks=False)
        return None if sealed == {TAG_MANIFEST: sums.sha256} else Fault(SEAL, _DIFFERS)

    def check_payload(self, known: Known, on_bytes: OnBytes | None = None) -> Checked:
        """Check every file below data/; call after check_tags. `on_bytes` gets the bytes read, from several threads."""
        folder = self._folder
        manifest = read_manifest(_text(folder / MANIFEST))
        present = {f"{PAYLOAD}/{path}" for path in files_below(folder / PAYLOAD)}
        faults = self.checked.faults
        faults += [Fault(path, _MISSING) for path in sorted(set(manifest) - present)]
        faults += [Fault(path, _FOREIGN) for path in sorted(present - set(manifest))]

        def check(path: str) -> Fault | None:
            return self._check_file(path, manifest[path], known, on_bytes)

        # the largest first: the last file to be read then is a small one
        todo = sorted(present & set(manifest), key=lambda path: (-known.n_bytes.get(path, 0), path))
        with ThreadPoolExecutor(workers()) as pool:
            faults += [fault for fault in pool.map(check, todo) if fault is not None]
        faults.sort(key=lambda fault: fault.path)
        self.checked.n_files += len(todo)
        self.checked.n_resumed = self._state.n_resumed
        self._state.finish()
        return self.checked

    def _check_file(self, path: str, sha256: str, known: Known, on_bytes: OnBytes | None) -> Fault | None:
        file = self._folder / path
        try:
            status = file.stat()
        except OSError as error:
            return Fault(path, f"cannot be read: {error.strerror or error}")
        expected = known.n_bytes.get(path, status.st_size)
        if status.st_size != expected:
            how = "is cut short" if status.st_size < expected else "is too long"
            return Fault(path, f"{how}: it has {status.st_size:,} bytes, but must have {expected:,}; {_AGAIN}")
        self.checked.n_bytes += status.st_size
        if self._state.has(path, status, sha256):
            if on_bytes is not None:
                on_bytes(status.st_size)
            return None
        sums = _readable_sums(self._folder, path, on_bytes)
        if isinstance(sums, Fault):
            return sums
        if sums.sha256 != sha256:
            return _damage(self._folder, path, known)
        self._state.add(path, status, sha256)
        return None


_AGAIN = "copy it again"
_MISSING = f"is missing; {_AGAIN}"
_DIFFERS = f"is damaged: its checksum differs; {_AGAIN}"
_FOREIGN = "does not belong to this bundle; remove it"


def _readable_sums(folder: Path, path: str, on_bytes: OnBytes | None = None) -> Sums | Fault:
    try:
        return sums_of(folder / path, on_bytes, blocks=False)
    except FileNotFoundError:
        return Fault(path, _MISSING)
    except OSError as error:
        return Fault(path, f"cannot be read: {error.strerror or error}; {_AGAIN}")


def _damage(folder: Path, path: str, known: Known) -> Fault:
    """Read a damaged file once more to say where: whoever has 40 GiB to copy copies 64 MiB instead."""
    blocks = known.blocks.get(path, ())
    if len(blocks) < 2:
        return Fault(path, _DIFFERS)
    found = sums_of(folder / path).blocks
    wrong = [i for i, (one, other) in enumerate(zip(found, blocks, strict=False)) if one != other]
    if not wrong:
        return Fault(path, _DIFFERS)
    first, count = wrong[0], wrong[-1] - wrong[0] + 1
    end = min(known.n_bytes[path], (wrong[-1] + 1) * BLOCK_BYTES) - 1
    return Fault(
        path,
        f"is damaged within bytes {first * BLOCK_BYTES:,} to {end:,} ({len(wrong)} of {len(blocks)} blocks); {_AGAIN}, "
        f"or that part of it: dd if=SOURCE/{path} of={path} bs=64M skip={first} seek={first} count={count} "
        f"conv=notrunc",
    )


class _State:
    """What has been read and was right, a line for each file, so that a check that was stopped goes on where it was."""

    def __init__(self, folder: Path, *, trust_finished: bool) -> None:
        self._path = folder / STATE
        self._seen: dict[str, list[object]] = {}
        self.n_resumed = 0
        finished = False
        with contextlib.suppress(OSError, ValueError):
            for line in self._path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry == {"finished": True}:
                    finished = True
                else:
                    self._seen[entry["path"]] = entry["seen"]
        if finished and not trust_finished:
            self._seen = {}
            with contextlib.suppress(OSError):  # a medium that cannot be written has no state that could be old
                self._path.unlink()

    def has(self, path: str, status: os.stat_result, sha256: str) -> bool:
        known = self._seen.get(path) == _fingerprint(status, sha256)
        self.n_resumed += known
        return known

    def add(self, path: str, status: os.stat_result, sha256: str) -> None:
        self._append({"path": path, "seen": _fingerprint(status, sha256)})

    def finish(self) -> None:
        self._append({"finished": True})

    def _append(self, entry: dict[str, object]) -> None:
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _fingerprint(status: os.stat_result, sha256: str) -> list[object]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256]
