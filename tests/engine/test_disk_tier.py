from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from server.engine.backend import State
from server.engine.background import Inline
from server.engine.disk_folder import DiskFolder, on_disk
from server.engine.disk_tier import DiskStore, DiskTier
from server.engine.host_tier import HostTier
from server.engine.identity import Identity
from server.engine.state_file import file_bytes
from server.errors import ConfigError
from tests.support.driving import Clock

OURS = Identity(b"m" * 16, b"s" * 16)
THEIRS = Identity(b"M" * 16, b"s" * 16)
TOKENS = list(range(1000))


def state(n_bytes: int, seed: int = 0) -> State:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


class Tiers:
    """A disk tier that does everything at once, and the host tier before it."""

    def __init__(self, folder: Path, limit: int = 1 << 20, host: int = 1 << 20, identity: Identity = OURS) -> None:
        self.host = HostTier(host)
        store = DiskStore(DiskFolder.open(folder), identity, limit, Inline(), Inline())
        self.disk = DiskTier(store, self.host, can_cut=True, clock=Clock())

    def keep(self, tokens: list[int], start: int = 0, n_bytes: int = 1000) -> None:
        entry = self.host.keep(tokens, start, state(n_bytes))
        assert entry is not None
        self.disk.keep(entry)
        self.disk.tend()

    def held(self) -> list[tuple[int, int]]:
        return sorted((entry.start, entry.end) for entry in self.disk.entries())

    def check(self, folder: Path) -> None:
        """The books are what the folder holds, and within the limit."""
        files = list(folder.rglob("*.state"))
        assert self.disk.n_bytes == sum(on_disk(file.stat().st_size) for file in files) <= self.disk.limit_bytes
        assert not list(folder.rglob("*.tmp"))


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    tiers.keep(TOKENS[:300], start=100)
    tiers.check(tmp_path)
    tiers.disk.close()

    again = Tiers(tmp_path)
    again.check(tmp_path)
    assert again.held() == [(0, 100), (100, 300)]
    entries = [part.entry for part in again.disk.way(TOKENS, 0)]
    assert again.disk.fetch(entries) == entries
    assert again.host.covered(TOKENS, 0) == 300
    assert [np.array_equal(entry.data, state(1000)) for entry in again.host.entries()] == [True, True]
    assert all(entry.intact() and entry.from_disk for entry in again.host.entries())


def test_what_is_inside_a_new_file_is_not_kept_twice(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    tiers.keep([9, 9, 9])
    tiers.keep(TOKENS[:200])
    tiers.keep(TOKENS[:50])
    assert tiers.held() == [(0, 3), (0, 200)]
    assert tiers.disk.counts.written == 3
    tiers.check(tmp_path)


def test_the_limit_holds_and_what_others_build_on_goes_last(tmp_path: Path) -> None:
    size = on_disk(file_bytes(300, 1000))
    tiers = Tiers(tmp_path, limit=3 * size)
    tiers.keep(TOKENS[:200])
    tiers.keep(TOKENS[:300], start=200)
    tiers.keep([7] * 50)
    tiers.keep([8] * 50)
    assert tiers.held() == [(0, 50), (0, 50), (0, 200)]
    tiers.disk.note_use(TOKENS)
    tiers.keep([9] * 50)
    assert sorted(entry.tokens[0] for entry in tiers.disk.entries()) == [0, 8, 9]
    tiers.check(tmp_path)


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    for i in range(3):
        tiers.keep([i] * 50)
    tiers.disk.note_use([0] * 50)
    tiers.disk.close()
    again = Tiers(tmp_path, limit=2 * on_disk(file_bytes(50, 1000)))
    assert sorted(entry.tokens[0] for entry in again.disk.entries()) == [0, 2]
    again.check(tmp_path)


def test_what_is_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, limit=8192)
    tiers.keep([1] * 50)
    tiers.keep([2] * 50, n_bytes=9000)
    assert tiers.held() == [(0, 50)]
    tiers.check(tmp_path)


def test_what_leaves_host_memory_before_its_turn_is_not_written(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    entry = tiers.host.keep(TOKENS[:100], 0, state(1000))
    assert entry is not None
    tiers.disk.keep(entry)
    tiers.host.drop(entry)
    tiers.disk.tend()
    assert (tiers.held(), tiers.disk.has_caught_up) == ([], True)


def test_files_of_other_models_count_and_are_the_first_to_go_when_they_are_older(tmp_path: Path) -> None:
    other = Tiers(tmp_path, identity=THEIRS)
    for i in range(3):
        other.keep([i] * 50)
    other.disk.close()
    size = on_disk(file_bytes(50, 1000))
    ours = Tiers(tmp_path, limit=4 * size)
    ours.keep(TOKENS[:50])
    assert (len(ours.disk), ours.disk.n_bytes) == (1, 4 * size)
    assert ours.disk.way([1] * 50, 0) == [], "a state of another model is never offered"
    ours.keep([5] * 50)
    ours.keep([6] * 50)
    ours.check(tmp_path)
    assert ours.held() == [(0, 50)] * 3
    assert len(list((tmp_path / THEIRS.name).iterdir())) == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "other tokens": lambda data: data[:130] + bytes([data[130] ^ 1]) + data[131:],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_refused_counted_and_removed(how: str, tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    (entry,) = tiers.disk.entries()
    entry.path.write_bytes(DAMAGE[how](entry.path.read_bytes()))
    tiers.host.drop(tiers.host.entries()[0])
    tiers.disk.fetch([entry])
    assert (len(tiers.host), tiers.host.n_bytes, tiers.held()) == (0, 0, [])
    assert (tiers.disk.counts.refused, entry.path.exists(), tiers.disk.n_bytes) == (1, False, 0)


@pytest.mark.parametrize("how", ["cut", "empty", "longer", "other tokens"])
def test_a_damaged_file_is_removed_at_the_start(how: str, tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    (entry,) = tiers.disk.entries()
    tiers.disk.close()
    entry.path.write_bytes(DAMAGE[how](entry.path.read_bytes()))
    assert Tiers(tmp_path).held() == []
    assert not entry.path.exists()


def test_a_file_that_has_gone_is_a_failure_and_no_damage(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    (entry,) = tiers.disk.entries()
    entry.path.unlink()
    tiers.host.drop(tiers.host.entries()[0])
    tiers.disk.fetch([entry])
    assert (tiers.disk.counts.refused, tiers.disk.counts.failed) == (0, 1)
    assert (len(tiers.host), tiers.held(), tiers.disk.n_bytes) == (0, [], 0)


def test_a_file_system_that_says_no_costs_the_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    tiers.keep(TOKENS[:100])
    assert (tiers.disk.counts.failed, tiers.held(), tiers.disk.n_bytes) == (1, [], 0)
    assert not list(tmp_path.rglob("*.tmp"))
    monkeypatch.undo()
    tiers.keep([5] * 50)
    assert tiers.held() == [(0, 50)]


def test_host_memory_that_has_no_room_gets_only_what_fits(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    tiers.keep(TOKENS[:200], start=100)
    tiers.disk.close()
    small = Tiers(tmp_path, host=2000)
    entries = [part.entry for part in small.disk.way(TOKENS, 0)]
    assert small.disk.fetch(entries) == entries[:1]
    assert small.host.covered(TOKENS, 0) == 100


def test_leftovers_of_a_write_that_was_cut_are_removed(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.keep(TOKENS[:100])
    tiers.disk.close()
    (tmp_path / OURS.name / ".x.state.77.tmp").write_bytes(b"half")
    Tiers(tmp_path).check(tmp_path)


def test_one_folder_serves_one_server(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    with pytest.raises(ConfigError, match="another server uses the folder"):
        DiskFolder.open(tmp_path)
    tiers.disk.close()
    DiskFolder.open(tmp_path).close()


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        DiskFolder.open(tmp_path / "file" / "folder")
