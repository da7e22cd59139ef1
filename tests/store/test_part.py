"""What a part claims to hold, and that it never claims more than is there: after a kill, after a power failure, after a
claim that was not wholly written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.store.part import Identity, Part, boot_id, open_part, part_path, read_checked, work_folder, write_checked

DATA = bytes(range(256)) * 4
IDENTITY = Identity(len(DATA), "a" * 64, "c0ffee")


def begin(tmp_path: Path, *, boot: str = "today", identity: Identity = IDENTITY, every: int = 1) -> Part:
    part, _ = open_part(tmp_path / "m.gguf", identity, boot=boot, claim_every_bytes=every)
    return part


def put(part: Part, start: int, stop: int) -> int:
    return part.write(start, memoryview(DATA)[start:stop])


def left_by_a_kill(part: Part) -> None:
    """The process is gone: nothing more is written."""
    os.close(part._file)
    part._file = -1


def test_a_whole_file_gets_its_name(tmp_path: Path) -> None:
    part = begin(tmp_path)
    assert part.missing() == [(0, 1024)]
    assert put(part, 512, 1024) == 512
    assert put(part, 0, 600) == 512
    assert part.missing() == []
    part.finish()
    assert (tmp_path / "m.gguf").read_bytes() == DATA
    assert not part_path(tmp_path / "m.gguf").exists()
    assert list(work_folder(tmp_path / "m.gguf").iterdir()) == []


def test_a_killed_process_leaves_what_it_claimed(tmp_path: Path) -> None:
    part = begin(tmp_path, every=100)
    put(part, 0, 100)
    put(part, 300, 350)
    left_by_a_kill(part)
    again = begin(tmp_path)
    assert again.missing() == [(100, 1024)]
    again.close()


def test_an_orderly_end_leaves_all_that_came(tmp_path: Path) -> None:
    part = begin(tmp_path, every=100)
    put(part, 300, 350)
    part.close()
    part.close()
    assert begin(tmp_path).missing() == [(0, 300), (350, 1024)]


def test_after_a_power_failure_only_what_was_on_the_disk_counts(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 100)
    part.sync()
    put(part, 100, 200)
    left_by_a_kill(part)
    again = begin(tmp_path, boot="tomorrow")
    assert again.missing() == [(100, 1024)]
    left_by_a_kill(again)
    assert begin(tmp_path, boot="the day after").missing() == [(100, 1024)]


def test_a_machine_without_boot_ids_trusts_the_disk_only(tmp_path: Path) -> None:
    part = begin(tmp_path, boot="")
    put(part, 0, 100)
    part.close()
    assert begin(tmp_path, boot="").missing() == [(0, 1024)]
    assert boot_id()


def test_nothing_is_claimed_synced_when_syncing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = begin(tmp_path)
    put(part, 0, 100)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        part.sync()
    put(part, 100, 200)
    left_by_a_kill(part)
    assert begin(tmp_path, boot="tomorrow").missing() == [(0, 1024)]


def test_bytes_come_before_their_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of every claim, what it says is in the file."""
    import server.store.part as module

    part = begin(tmp_path)
    claims = 0

    def look(file: Path, content: bytes, *, durable: bool) -> None:
        nonlocal claims
        claims += 1
        there = part_path(tmp_path / "m.gguf").read_bytes()
        for start, stop in part._written:
            assert there[start:stop] == DATA[start:stop]
        write_checked(file, content, durable=durable)

    monkeypatch.setattr(module, "write_checked", look)
    for start in range(0, 1024, 64):
        put(part, start, start + 64)
    assert claims == 16


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "no json"])
def test_a_damaged_state_claims_nothing(tmp_path: Path, harm: str) -> None:
    part = begin(tmp_path)
    put(part, 0, 100)
    part.close()
    state = work_folder(tmp_path / "m.gguf") / "m.gguf.state"
    content = state.read_bytes()
    match harm:
        case "cut":
            state.write_bytes(content[:-5])
        case "changed":
            state.write_bytes(content.replace(b"100", b"900"))
        case "gone":
            state.unlink()
        case _:
            write_checked(state, b"hello", durable=False)
    again, why = open_part(tmp_path / "m.gguf", IDENTITY, boot="today")
    assert again.missing() == [(0, 1024)]
    assert why == "the record of what is there is missing or damaged"


def test_another_file_under_the_same_name_starts_anew(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 100)
    part.close()
    again, why = open_part(tmp_path / "m.gguf", Identity(1024, "b" * 64, "cafe"), boot="today")
    assert again.missing() == [(0, 1024)]
    assert why == "it has changed at the hub since revision c0ffee"


def test_the_same_file_in_another_revision_goes_on(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 100)
    part.close()
    again, why = open_part(tmp_path / "m.gguf", Identity(1024, "a" * 64, "cafe"), boot="today")
    assert again.missing() == [(100, 1024)]
    assert why is None


def test_a_part_that_was_cut_claims_what_it_has(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 1000)
    part.close()
    os.truncate(part_path(tmp_path / "m.gguf"), 400)
    assert begin(tmp_path).missing() == [(400, 1024)]


def test_what_is_forgotten_comes_again(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 1024)
    part.sync()
    part.forget((10, 20))
    left_by_a_kill(part)
    again = begin(tmp_path, boot="tomorrow")
    assert again.missing() == [(10, 20)]
    again.forget()
    assert again.missing() == [(0, 1024)]


def test_a_file_got_in_another_way_can_take_its_place(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 10)
    (tmp_path / "other").write_bytes(DATA)
    part.replace_by(tmp_path / "other")
    assert part.missing() == []
    part.finish()
    assert (tmp_path / "m.gguf").read_bytes() == DATA


def test_checked_files_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    write_checked(tmp_path / "x", b"content", durable=True)
    assert read_checked(tmp_path / "x") == b"content"
    assert read_checked(tmp_path / "absent") is None
    (tmp_path / "x").write_bytes(b"")
    assert read_checked(tmp_path / "x") is None
