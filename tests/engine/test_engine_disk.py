"""The engine with a disk behind it: what comes back after a restart, and that a damaged file costs time only."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.background import Inline
from server.engine.disk_folder import DiskFolder
from server.engine.disk_tier import DiskStore, DiskTier
from server.engine.engine import Engine
from server.engine.identity import Identity
from server.engine.messages import Started
from server.engine.options import SchedulerOptions
from tests.support.driving import Clock, Log, check_books, job, run_to_end, text_alone
from tests.support.scripted import ScriptedBackend

STEM = "the quick brown fox jumps over the lazy dog, " * 3
MEMORIES: dict[str, dict[str, Any]] = {
    "unified": {},
    "streams": {"unified": False},
    "uncuttable": {"partial_removal": False},
}


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device is no part of what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Life:
    """One start of an engine over a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        cache_ram_bytes: int = 1 << 20,
        limit: int = 1 << 24,
        reader: Inline | None = None,
        **memory: object,
    ) -> None:
        spare = 8 if memory.get("unified", True) and memory.get("partial_removal", True) else 0
        self.backend = ScriptedBackend(n_sequences=4 + spare if spare else 0, **memory)  # type: ignore[arg-type]
        store = DiskStore(DiskFolder.open(folder), Identity(b"m" * 16, b"s" * 16), limit, Inline(), reader or Inline())
        self.engine = Engine(self.backend, SchedulerOptions(cache_ram_bytes=cache_ram_bytes), Clock(), store)
        self.log = Log()
        self.n_jobs = 0

    @property
    def disk(self) -> DiskTier:
        assert self.engine.cache.disk is not None
        return self.engine.cache.disk

    def ask(self, *prompts: str, n: int = 5) -> list[str]:
        ids = range(self.n_jobs, self.n_jobs + len(prompts))
        self.n_jobs += len(prompts)
        for job_id, prompt in zip(ids, prompts, strict=True):
            self.engine.submit(job(job_id, prompt, n))
        run_to_end(self.engine, self.log)
        check_books(self.engine, self.backend)
        return [self.log.text(job_id) for job_id in ids]

    def n_cached(self, job_id: int = -1) -> int:
        job_id = job_id if job_id >= 0 else self.n_jobs - 1
        return next(event.n_cached for event in self.log.of(job_id) if isinstance(event, Started))

    def end(self, save_s: float = 60.0) -> None:
        self.engine.close(save_s)


class Held(Inline):
    """Does nothing before `release`."""

    def __init__(self) -> None:
        self._held: list[Callable[[], None]] = []

    def start(self, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        self._held.append(lambda: super(Held, self).start(work, then))

    def release(self) -> None:
        for each in self._held:
            each()


def alone(prompt: str, n: int = 5) -> str:
    return text_alone(prompt, n)


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_old_chat_is_not_read_again_after_a_restart(memory: str, tmp_path: Path) -> None:
    first = Life(tmp_path, **MEMORIES[memory])
    (answer,) = first.ask(STEM)
    first.end()

    again = Life(tmp_path, **MEMORIES[memory])
    turn = f"{STEM}{answer[:-1]} and then?"
    (text,) = again.ask(turn)
    assert text == alone(turn)
    assert again.n_cached() >= len(STEM) - 1
    counters = again.engine.snapshot().counters
    assert counters.prompt_cached_tokens == counters.cached_tokens_disk == again.n_cached()
    assert counters.cached_tokens_host == 0
    again.end()


def test_what_the_writer_has_caught_up_with_needs_no_clean_end(tmp_path: Path) -> None:
    """Idle time is used: nothing is only in cells when everything is done."""
    first = Life(tmp_path)
    one, two = STEM + "one" * 15, STEM + "two" * 15
    first.ask(one, two)
    assert not first.engine.snapshot().disk_cache_pending
    first.disk.close()  # the lock goes with a process that is killed

    again = Life(tmp_path)
    again.ask(two + "x", one + "x")
    assert [again.n_cached(0), again.n_cached(1)] == [len(one)] * 2
    again.end()


def test_a_shared_prefix_is_written_once_and_whole(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.ask(*(STEM + letter * 40 for letter in "abc"))
    first.end()
    again = Life(tmp_path)
    spans = sorted((entry.start, entry.end) for entry in again.disk.entries())
    assert [start for start, _ in spans] == [0, len(STEM), len(STEM)]
    again.end()


def test_without_time_to_save_nothing_is_saved_and_nothing_breaks(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.engine.submit(job(0, STEM, 30))
    for _ in range(10):
        first.log.events += first.engine.step()
    first.end(save_s=0.0)
    again = Life(tmp_path)
    assert again.ask(STEM) == [alone(STEM)]
    assert again.n_cached() == 0
    again.end()


def test_jobs_that_run_at_the_end_leave_what_they_have_read(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.engine.submit(job(0, STEM, 30))
    for _ in range(10):
        first.log.events += first.engine.step()
    first.end()
    again = Life(tmp_path)
    again.ask(STEM)
    assert again.n_cached() == len(STEM) - 1
    again.end()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("at", [0, 9, 33, 60, 100, 140, -1])
def test_after_a_damaged_file_the_answer_is_right(at: int, memory: str, tmp_path: Path) -> None:
    first = Life(tmp_path, **MEMORIES[memory])
    first.ask(STEM)
    first.end()
    again = Life(tmp_path, **MEMORIES[memory])  # before the damage, which its start would find
    (file,) = tmp_path.rglob("*.state")
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    assert again.ask(STEM + "?") == [alone(STEM + "?")]
    counters = again.engine.snapshot().counters
    assert (again.n_cached(), counters.disk_refused) == (0, 1)
    assert not [file for file in tmp_path.rglob("*.state") if file.read_bytes() == data], "removed"
    again.end()


@pytest.mark.parametrize("at", [0, 1, 500, -1])
def test_after_a_damaged_state_in_host_memory_the_answer_is_right(at: int, tmp_path: Path) -> None:
    life = Life(tmp_path, n_ctx=256)
    life.ask(STEM)
    while life.engine.cache.drop_one():
        pass
    (entry,) = life.engine.cache.host.entries()
    entry.data[at] ^= 1
    assert life.ask(STEM + "?") == [alone(STEM + "?")]
    assert life.engine.snapshot().counters.states_refused == 1
    assert life.n_cached() == 0
    life.end()


def test_those_behind_a_job_that_waits_for_the_disk_go_first(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.ask(STEM)
    first.end()
    reader = Held()
    again = Life(tmp_path, reader=reader)
    again.engine.submit(job(0, STEM + "?", 3))
    again.engine.submit(job(1, "short", 3))
    again.n_jobs = 2
    run_to_end(again.engine, again.log)
    assert again.log.text(1) == alone("short", 3), "served while the other waits"
    assert not again.log.of(0)
    assert not again.engine.has_work, "the process sleeps until the reader wakes it"
    assert again.engine.snapshot().n_waiting == 1
    reader.release()
    run_to_end(again.engine, again.log)
    assert again.log.text(0) == alone(STEM + "?", 3)
    assert again.n_cached(0) == len(STEM)
    again.end()


def test_a_job_that_is_cancelled_while_it_waits_for_the_disk(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.ask(STEM)
    first.end()
    again = Life(tmp_path)
    again.engine.submit(job(0, STEM + "?", 3))
    again.engine.cancel(0)
    run_to_end(again.engine, again.log)
    again.n_jobs = 1
    assert again.ask(STEM + "!") == [alone(STEM + "!")]
    again.end()


def test_reading_that_is_slower_than_the_prompt_is_left_out(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.ask(STEM, "x" * 200)
    first.end()
    again = Life(tmp_path)
    again.ask("x" * 200 + "?")
    assert again.n_cached() == 200
    again.ask("y" * 300)  # all speeds are known now
    again.disk._read_bytes_per_s = 1.0
    again.ask(STEM + "?")
    assert again.n_cached() == 0
    again.end()


prompts = st.builds(
    lambda stem, tail: stem + tail,
    st.sampled_from(["", "a" * 40, "a" * 70, "ab" * 20]),
    st.text(alphabet="abc", min_size=1, max_size=30),
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lives=st.lists(st.lists(prompts, min_size=1, max_size=8), min_size=2, max_size=3),
    memory=st.sampled_from(sorted(MEMORIES)),
    host=st.sampled_from([900, 4000, 1 << 20]),
    limit=st.sampled_from([4096, 20000, 1 << 20]),
)
def test_no_text_changes_across_restarts(
    lives: list[list[str]], memory: str, host: int, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    for prompts_of_life in lives:
        life = Life(folder, cache_ram_bytes=host, limit=limit, n_ctx=640, **MEMORIES[memory])
        assert life.ask(*prompts_of_life) == [alone(prompt) for prompt in prompts_of_life]
        snapshot = life.engine.snapshot()
        assert snapshot.disk_cache_bytes <= limit
        counters = snapshot.counters
        assert counters.cached_tokens_host + counters.cached_tokens_disk <= counters.prompt_cached_tokens
        assert counters.disk_refused == counters.disk_failed == counters.states_refused == 0
        life.end()
