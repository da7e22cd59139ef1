"""Slots in files: what is saved comes back, whoever holds it now; names stay inside the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.background import Inline
from server.engine.identity import Identity
from server.engine.messages import ActOnSlot, SlotAction, SlotDone, SlotRefusal, SlotRefused, Started
from server.engine.slot_files import Answer, SlotFiles, check_name
from server.errors import InvalidRequest
from tests.support.driving import Log, check_books, engine_of, job, run_to_end, text_alone
from tests.support.scripted import ScriptedBackend

OURS = Identity(b"m" * 16, b"s" * 16)
STEM = "the quick brown fox jumps over the lazy dog, " * 2
MEMORIES: dict[str, dict[str, Any]] = {
    "unified": {},
    "streams": {"unified": False},
    "uncuttable": {"partial_removal": False},
}


class Served:
    def __init__(self, folder: Path, identity: Identity = OURS, **memory: object) -> None:
        self.backend = ScriptedBackend(n_slots=2, **memory)  # type: ignore[arg-type]
        self.engine = engine_of(self.backend)
        self.answers: list[Answer] = []
        self.files = SlotFiles(self.engine.resting, folder, identity, Inline(), self.answers.append)
        self.log = Log()

    def ask(self, job_id: int, prompt: str, slot: int | None = None) -> str:
        self.engine.submit(job(job_id, prompt, 5, slot=slot))
        run_to_end(self.engine, self.log)
        check_books(self.engine, self.backend)
        return self.log.text(job_id)

    def n_cached(self, job_id: int) -> int:
        return next(event.n_cached for event in self.log.of(job_id) if isinstance(event, Started))

    def act(self, slot: int, action: SlotAction, filename: str = "chat.bin") -> Answer:
        self.files.act(ActOnSlot(len(self.answers), slot, action, filename))
        answer = self.answers[-1]
        assert answer.call_id == len(self.answers) - 1
        check_books(self.engine, self.backend)
        return answer

    def done(self, slot: int, action: SlotAction, filename: str = "chat.bin") -> SlotDone:
        answer = self.act(slot, action, filename)
        assert isinstance(answer, SlotDone), answer
        return answer

    def refused(self, slot: int, action: SlotAction, filename: str = "chat.bin") -> SlotRefused:
        answer = self.act(slot, action, filename)
        assert isinstance(answer, SlotRefused), answer
        return answer


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_slot_that_was_saved_comes_back_in_another_server(memory: str, tmp_path: Path) -> None:
    first = Served(tmp_path, **MEMORIES[memory])
    text = first.ask(1, STEM, slot=1)
    saved = first.done(1, SlotAction.SAVE)
    assert saved.n_tokens == len(STEM) + 4
    assert saved.n_bytes == (tmp_path / "chat.bin").stat().st_size

    other = Served(tmp_path, **MEMORIES[memory])
    restored = other.done(0, SlotAction.RESTORE)
    assert (restored.n_tokens, restored.n_bytes) == (saved.n_tokens, saved.n_bytes)
    assert other.engine.snapshot().slots[0].n_kept == saved.n_tokens
    turn = f"{STEM}{text[:-1]} and then?"
    assert other.ask(1, turn, slot=0) == text_alone(turn, 5)
    assert other.n_cached(1) == len(STEM) + 4


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_erased_slot_reads_again(memory: str, tmp_path: Path) -> None:
    served = Served(tmp_path, **MEMORIES[memory])
    served.ask(1, STEM, slot=0)
    assert served.done(0, SlotAction.ERASE).n_tokens == len(STEM) + 4
    assert served.done(0, SlotAction.ERASE).n_tokens == 0
    assert served.engine.snapshot().slots[0].n_kept == 0
    assert "holds nothing" in served.refused(0, SlotAction.SAVE).message


def test_what_made_room_for_others_is_saved_all_the_same(tmp_path: Path) -> None:
    served = Served(tmp_path, n_sequences=6)
    served.ask(1, STEM, slot=0)
    while served.engine.cache.drop_one():
        pass
    assert served.engine.cache.n_used == 0
    assert served.done(0, SlotAction.SAVE).n_tokens == len(STEM) + 4


def test_what_another_slot_goes_on_with_is_saved_as_it_was_left(tmp_path: Path) -> None:
    served = Served(tmp_path, n_sequences=6)
    text = served.ask(1, STEM, slot=0)
    turn = f"{STEM}{text[:-1]} and then?"
    served.ask(2, turn, slot=1)
    assert served.done(0, SlotAction.SAVE).n_tokens == len(STEM) + 4
    assert served.done(1, SlotAction.SAVE).n_tokens == len(turn) + 4


def test_a_slot_at_work_is_told_apart(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.engine.submit(job(1, STEM, 50, slot=0))
    served.engine.step()
    for action in SlotAction:
        answer = served.refused(0, action)
        assert answer.reason is SlotRefusal.BUSY
        assert "slot 0 is at work" in answer.message
    assert served.refused(2, SlotAction.SAVE).message == "there is no slot 2; there are 0 to 1"


def test_a_file_of_another_model_or_none_is_refused_in_words(tmp_path: Path) -> None:
    first = Served(tmp_path)
    first.ask(1, STEM, slot=0)
    first.done(0, SlotAction.SAVE)
    other = Served(tmp_path, Identity(b"x" * 16, b"s" * 16))
    answer = other.refused(0, SlotAction.RESTORE)
    assert answer.message == "'chat.bin' cannot be restored: it is of another model"
    assert (answer.reason, answer.param) == (SlotRefusal.INVALID, "filename")
    assert other.refused(0, SlotAction.RESTORE, "none").message == "there is no file 'none' to restore"


@pytest.mark.parametrize("at", [0, 9, 13, 25, 40, 70, 100, 130, 500, -1])
def test_a_damaged_file_leaves_the_slot_as_it_was(at: int, tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.ask(1, STEM, slot=0)
    served.done(0, SlotAction.SAVE)
    data = bytearray((tmp_path / "chat.bin").read_bytes())
    data[at] ^= 32
    (tmp_path / "chat.bin").write_bytes(data)
    assert served.refused(1, SlotAction.RESTORE).reason is SlotRefusal.INVALID
    assert served.refused(0, SlotAction.RESTORE).reason is SlotRefusal.INVALID
    assert served.ask(2, STEM + "?", slot=0) == text_alone(STEM + "?", 5)
    assert served.n_cached(2) == len(STEM)


def test_a_file_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    first = Served(tmp_path)
    first.ask(1, STEM, slot=0)
    first.done(0, SlotAction.SAVE)
    small = Served(tmp_path, n_ctx=64)
    assert "holds 94 tokens, but one request may use 64" in small.refused(0, SlotAction.RESTORE).message
    full = Served(tmp_path, n_ctx=128)
    full.engine.submit(job(1, "x" * 60, 50, slot=1))
    for _ in range(12):
        full.engine.step()
    assert "running requests leave no room" in full.refused(0, SlotAction.RESTORE).message


def test_a_folder_that_takes_nothing_is_our_fault_and_not_the_clients(tmp_path: Path) -> None:
    served = Served(tmp_path / "gone")
    served.ask(1, STEM, slot=0)
    answer = served.refused(0, SlotAction.SAVE)
    assert (answer.reason, "--slot-save-path" in answer.message) == (SlotRefusal.FAILED, True)


OUTSIDE = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "C:x",
    "..\\x",
    ".hidden",
    " x",
    "x ",
    "x.",
    "a..b",
    "x\0y",
    "x\n",
    "a" * 201,
    "é" * 101,
    "a∕b",
    "．．",
    "~/x",
    "%2e%2e/x",
]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("action", [SlotAction.SAVE, SlotAction.RESTORE])
def test_names_cannot_leave_the_folder(action: SlotAction, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    served = Served(folder)
    served.ask(1, STEM, slot=0)
    answer = served.refused(0, action, name)
    assert (answer.reason, answer.param) == (SlotRefusal.INVALID, "filename")
    assert "is not allowed" in answer.message
    assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["slots"]


def test_a_link_leads_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    served = Served(folder)
    served.ask(1, STEM, slot=0)
    served.done(0, SlotAction.SAVE)
    (folder / "chat.bin").rename(tmp_path / "outside")
    (folder / "chat.bin").symlink_to(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    assert "cannot be read" in served.refused(0, SlotAction.RESTORE).message
    served.ask(2, STEM + "more", slot=0)
    served.done(0, SlotAction.SAVE)
    assert (tmp_path / "outside").read_bytes() == before
    assert not (folder / "chat.bin").is_symlink()


@pytest.mark.parametrize("name", ["chat", "chat.bin", "Chat 7 (copy).bin", "a" * 200, "对话.bin", "user@host=1,2;3"])
def test_names_that_are_names(name: str) -> None:
    assert check_name(name) == name


@given(st.text(max_size=20))
def test_a_name_that_passes_is_one_component(name: str) -> None:
    try:
        check_name(name)
    except InvalidRequest:
        return
    assert os.path.basename(name) == name
    assert name not in ("", ".", "..")
    assert Path("/srv/slots", name).parent == Path("/srv/slots")
    assert os.path.normpath(f"/srv/slots/{name}") == f"/srv/slots/{name}"
