"""Getting a model from a hub that has every fault in turn: the files are right in the end, or a sentence tells why."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from filelock import FileLock

from server.errors import FetchError
from server.store import sums
from server.store.fetch import Fetch, FileProgress, Plan, Stage, plan_fetch
from server.store.hub import Hub, Listing
from server.store.manifest import read_manifest
from server.store.names import HubName
from server.store.obtain import Obtainer
from server.store.part import WORK_FOLDER, part_path
from server.store.places import Places
from server.store.quants import RemoteFile, quants_of
from server.store.source import resolve_model
from server.store.transfer import TransferOptions
from tests.support.fake_hub import (
    Cut,
    FakeHub,
    Flip,
    IgnoreRange,
    OtherEtag,
    Slow,
    Stall,
    Status,
    WebPage,
)
from tests.support.gguf_bytes import write_shards

REPO = "unsloth/GLM-GGUF"
KIB = 1 << 10
SIZE = 600 * KIB
OPTIONS = TransferOptions(
    connections=4, piece_bytes=64 * KIB, read_timeout_s=20, first_wait_s=0.01, give_up_s=30, claim_every_bytes=32 * KIB
)


def model_bytes(seed: int = 1, size: int = SIZE) -> bytes:
    """Noise of about this size: no two places of it are alike."""
    return hashlib.shake_256(bytes([seed])).digest(size + 77)


CONTENT = model_bytes()


class Notes:
    """A watcher that keeps what it is told; `on_tick` may do something in between."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.plans: list[Plan] = []
        self.stages: set[Stage | None] = set()
        self.on_tick: Callable[[], None] = lambda: None

    def begin(self, plan: Plan) -> None:
        self.plans.append(plan)

    def tick(self, files: Sequence[FileProgress]) -> None:
        self.stages |= {each.stage for each in files}
        self.on_tick()

    def say(self, text: str) -> None:
        self.said.append(text)


class Bench:
    """A hub with one model, a folder to fetch to, and the shortest way to do it."""

    def __init__(self, hub: FakeHub, tmp_path: Path) -> None:
        self.hub = hub
        self.to = tmp_path / "models" / "glm"
        self.file = self.to / "m.gguf"
        self.notes = Notes()
        self.options = OPTIONS
        self.token: str | None = None
        self.places = Places(tmp_path / "models", tmp_path / "hf")

    @property
    def obtainer(self) -> Obtainer:
        return Obtainer(Hub(self.hub.endpoint, self.token), self.places, self.options, self.notes)

    def fetch(self, name: HubName | None = None, *, repair: bool = False) -> Path:
        return self.obtainer.fetch(name or HubName(REPO), to=self.to, repair=repair)

    def refusal(self, name: HubName | None = None) -> str:
        with pytest.raises(FetchError) as caught:
            self.fetch(name)
        assert "\n" not in caught.value.message
        return caught.value.message

    def is_right(self) -> bool:
        return self.file.read_bytes() == CONTENT and not part_path(self.file).exists()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with FakeHub() as hub:
        hub.add(REPO, {"m.gguf": CONTENT, "README.md": b"# GLM"})
        yield Bench(hub, tmp_path)


def test_a_sharded_quant_comes_whole(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    files = {f"UD-Q4_K_M/{path.name}": path.read_bytes() for path in write_shards(tmp_path / "made")}
    bench.hub.add("a/b", {**files, "UD-IQ1_S/x.gguf": b"no", "mmproj-F16.gguf": b"no"})
    bench.token = "hf_right"
    first = bench.fetch(HubName("a/b", "ud-q4_k_m"))
    assert first == bench.to / "big-00001-of-00003.gguf"
    assert sorted(path.name for path in bench.to.glob("*")) == sorted(
        [WORK_FOLDER, ".glmserve.json", *(name.rpartition("/")[2] for name in files)]
    )
    assert len(resolve_model(bench.to).shards) == 3
    (recorded,) = read_manifest(bench.to)
    assert (recorded.repo, recorded.quant, recorded.revision) == ("a/b", "UD-Q4_K_M", bench.hub.repos["a/b"].head)
    assert [each.sha256 for each in recorded.files] == [
        hashlib.sha256(files[name]).hexdigest() for name in sorted(files)
    ]
    assert {request.token for request in bench.hub.requests if request.site == "cdn"} == {None}
    assert bench.hub.total_sent() == sum(map(len, files.values()))
    assert bench.notes.said == []


def test_a_file_comes_over_several_connections_each_byte_once(bench: Bench) -> None:
    bench.hub.fault(Slow(400 * KIB), times=None)
    bench.fetch()
    assert bench.is_right()
    assert bench.hub.total_sent() == len(CONTENT)
    ranges = [request.range for request in bench.hub.requests if request.site == "cdn"]
    assert len(ranges) == len(set(ranges)) >= 10


@pytest.mark.parametrize("reset", [False, True])
def test_dropped_connections_cost_little(bench: Bench, reset: bool) -> None:
    bench.hub.fault(Cut(10 * KIB, reset=reset), times=6)
    bench.fetch()
    assert bench.is_right()
    assert bench.hub.total_sent() <= len(CONTENT) + 6 * 10 * KIB


def test_a_busy_hub_is_asked_again(bench: Bench) -> None:
    bench.hub.fault(Status(503), times=3)
    bench.hub.fault(Status(429, {"Retry-After": "0"}), times=2)
    bench.hub.fault(Status(500), site="hub", on="resolve")
    bench.fetch()
    assert bench.is_right()
    assert any("answers 503" in said for said in bench.notes.said)
    assert any("answers 429" in said for said in bench.notes.said)
    assert len([said for said in bench.notes.said if "answers 503" in said]) == 1


def test_a_hub_that_asks_for_more_patience_than_there_is(bench: Bench) -> None:
    bench.hub.fault(Status(429, {"Retry-After": "3000"}), times=None)
    message = bench.refusal()
    assert "answers 429 Too Many Requests, which asks to wait 3000 s" in message
    assert "run the same command later to go on from 0 of" in message


def test_a_hub_that_is_down_for_long_ends_it(bench: Bench) -> None:
    bench.options = replace(OPTIONS, give_up_s=0.2, first_wait_s=0.05)
    bench.hub.fault(Status(503), skip=3, times=None)
    assert "no byte came for" in bench.refusal()
    bench.hub.clear_faults()
    before = bench.hub.total_sent()
    bench.fetch()
    assert bench.is_right()
    assert 0 < before < len(CONTENT)
    assert bench.hub.total_sent() == len(CONTENT)


def test_wrong_bytes_are_found_and_come_once_more(bench: Bench) -> None:
    bench.hub.fault(Flip(300 * KIB), times=5)  # whichever of the first five answers holds that byte
    bench.fetch()
    assert bench.is_right()
    assert bench.notes.said == ["m.gguf: its SHA-256 is wrong; getting it once more"]


def test_bytes_that_are_always_wrong_end_it(bench: Bench) -> None:
    bench.hub.fault(Flip(1), times=None)
    assert "m.gguf came twice with a wrong SHA-256" in bench.refusal()
    assert not bench.file.exists()
    bench.hub.clear_faults()
    bench.fetch()
    assert bench.is_right()


def test_another_etag_than_the_list_says_ends_it(bench: Bench) -> None:
    bench.hub.fault(OtherEtag(), site="hub", on="resolve", times=None)
    assert "m.gguf has another ETag (000000000000…) than in the hub's own list" in bench.refusal()


def test_a_file_that_changed_since_yesterday_starts_anew(bench: Bench) -> None:
    stop_after(bench, 200 * KIB)
    new = model_bytes(2)
    bench.hub.commit(REPO, {"m.gguf": new})
    bench.fetch()
    assert bench.file.read_bytes() == new
    assert "m.gguf: starts anew, because it has changed at the hub since revision" in bench.notes.said[0]


def test_another_commit_with_the_same_file_goes_on(bench: Bench) -> None:
    stop_after(bench, 200 * KIB)
    bench.hub.commit(REPO, {"README.md": b"new"})
    before = bench.hub.total_sent()
    bench.fetch()
    assert bench.is_right()
    assert bench.hub.total_sent() - before < len(CONTENT) - 100 * KIB
    assert bench.notes.said == []


def stop_after(bench: Bench, n_bytes: int) -> None:
    """Ctrl-C in the middle."""

    def interrupt() -> None:
        if bench.hub.bytes_sent >= n_bytes:
            raise KeyboardInterrupt

    bench.hub.fault(Slow(400 * KIB), times=None)
    bench.notes.on_tick = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.fetch()
    bench.hub.clear_faults()
    bench.notes.on_tick = lambda: None
    assert part_path(bench.file).exists()
    assert threading.active_count() < 30


def test_an_interrupted_fetch_loses_nothing_that_came(bench: Bench) -> None:
    stop_after(bench, 200 * KIB)
    bench.fetch()
    assert bench.is_right()
    assert bench.hub.total_sent() <= len(CONTENT) + 4 * 64 * KIB  # what was on its way on four connections


def test_gated_models_want_a_token(bench: Bench) -> None:
    bench.hub.add("a/gated", {"m.gguf": CONTENT}, gated=True)
    message = bench.refusal(HubName("a/gated"))
    assert "the model is gated or private; accept its terms" in message
    assert f"at {bench.hub.endpoint}/a/gated, then give a token with HF_TOKEN" in message
    bench.token = "hf_other"
    assert "the token may not see this gated model" in bench.refusal(HubName("a/gated"))
    bench.token = "hf_right"
    bench.fetch(HubName("a/gated"))
    assert bench.is_right()


def test_a_renamed_repository_is_followed(bench: Bench) -> None:
    bench.hub.rename(REPO, "unsloth/New-GGUF")
    bench.fetch()
    assert bench.is_right()
    assert bench.notes.plans[0].listing.repo == "unsloth/New-GGUF"


def test_links_that_expire_on_the_way_are_renewed(bench: Bench) -> None:
    expired: list[bool] = []

    def expire() -> None:
        if not expired and bench.hub.bytes_sent > 100 * KIB:
            expired.append(True)
            bench.hub.expire_links()

    bench.hub.fault(Slow(400 * KIB), times=None)
    bench.notes.on_tick = expire
    bench.fetch()
    assert bench.is_right()
    assert any(request.status == 403 for request in bench.hub.requests if request.site == "cdn")
    assert bench.hub.total_sent() == len(CONTENT)
    assert bench.notes.said == []


def test_links_that_are_always_refused_end_it(bench: Bench) -> None:
    bench.hub.link_s = -10  # this machine's clock is wrong
    assert "is refused by the content network again and again; check the clock" in bench.refusal()


def test_a_connection_on_which_nothing_comes_is_left(bench: Bench) -> None:
    bench.options = replace(OPTIONS, read_timeout_s=0.3)
    bench.hub.fault(Stall(5 * KIB), times=3)
    bench.fetch()
    assert bench.is_right()
    assert any("nothing came from" in said for said in bench.notes.said)


def test_a_range_that_is_ignored_once_is_asked_for_again(bench: Bench) -> None:
    bench.hub.fault(IgnoreRange(), skip=2)
    bench.fetch()
    assert bench.is_right()


def test_a_server_without_ranges_is_read_from_the_start(bench: Bench) -> None:
    bench.hub.fault(Cut(100 * KIB))
    bench.hub.fault(IgnoreRange(), times=None)
    bench.fetch()
    assert bench.is_right()


def test_a_login_page_in_between_is_named(bench: Bench) -> None:
    bench.hub.fault(WebPage(), times=None)
    message = bench.refusal()
    assert "instead of the file" in message
    assert "came a web page; a proxy or a login page is in between" in message


def test_a_rate_limit_is_kept(bench: Bench) -> None:
    bench.options = replace(OPTIONS, bytes_per_s=1_000_000)
    start_s = time.monotonic()
    bench.fetch()
    assert bench.is_right()
    assert 0.3 < time.monotonic() - start_s < 3


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_disk_without_room_is_told_before_the_first_byte(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 400 * KIB))
    message = bench.refusal()
    assert f"{REPO}:m needs 600.1 KiB more, but the disk of '{bench.to}' has 400.0 KiB free" in message
    assert bench.hub.total_sent() == 0
    monkeypatch.undo()
    stop_after(bench, 450 * KIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 400 * KIB))
    bench.fetch()  # what is there already needs no room
    assert bench.is_right()


def test_a_disk_that_fills_up_on_the_way_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.pwrite, [5]

    def pwrite(file: int, data: memoryview, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    message = bench.refusal()
    assert message.startswith("the disk is full: m.gguf could not be written further")
    assert "it goes on from there" in message
    monkeypatch.undo()
    bench.fetch()
    assert bench.is_right()


def test_a_folder_that_cannot_be_made_is_named(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    assert f"the folder '{bench.to}' cannot be used: Not a directory" in bench.refusal()


def test_a_second_process_waits_for_the_first(bench: Bench) -> None:
    (bench.to / WORK_FOLDER).mkdir(parents=True)
    first = FileLock(bench.to / WORK_FOLDER / "m.gguf.lock", thread_local=False)
    first.acquire()
    waited: list[list[str]] = []

    def finish_the_first() -> None:
        if bench.notes.said and not waited:
            waited.append(list(bench.notes.said))
            bench.file.write_bytes(CONTENT)
            first.release()

    bench.notes.on_tick = finish_the_first
    bench.fetch()
    assert waited == [["m.gguf: another process is getting this file; waiting for it"]]
    assert bench.is_right()
    assert bench.hub.total_sent() == 0


# ── files that are here already ──────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_is_here_is_checked_and_kept(bench: Bench) -> None:
    bench.to.mkdir(parents=True)
    bench.file.write_bytes(CONTENT)
    bench.fetch()
    assert Stage.CHECKING in bench.notes.stages
    bench.notes.stages.clear()
    bench.fetch()
    assert Stage.CHECKING not in bench.notes.stages
    assert bench.hub.total_sent() == 0


@pytest.mark.parametrize("content", [b"mine", bytes(len(CONTENT))])
def test_a_file_of_somebody_else_is_not_overwritten(bench: Bench, content: bytes) -> None:
    bench.to.mkdir(parents=True)
    bench.file.write_bytes(content)
    assert "if it may be replaced, add --repair" in bench.refusal()
    assert bench.file.read_bytes() == content
    bench.fetch(repair=True)
    assert bench.is_right()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCK_BYTES", 64 * KIB)


@pytest.mark.usefixtures("small_blocks")
def test_repair_gets_only_the_blocks_that_changed(bench: Bench) -> None:
    bench.fetch()
    stat = bench.file.stat()
    with open(bench.file, "r+b") as file:
        file.seek(200 * KIB)
        file.write(b"harm")
    os.utime(bench.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk does it
    before = bench.hub.total_sent()
    bench.fetch()
    assert not bench.is_right()
    bench.fetch(repair=True)
    assert bench.is_right()
    assert bench.hub.total_sent() - before == 64 * KIB
    assert bench.notes.said == ["m.gguf: 64.0 KiB of 600.1 KiB are wrong or missing"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("harm", ["cut", "joined"])
def test_a_fetched_file_of_another_length_is_mended(bench: Bench, harm: str) -> None:
    bench.fetch()
    with open(bench.file, "r+b") as file:
        if harm == "cut":
            file.truncate(500 * KIB)
        else:
            file.seek(0, os.SEEK_END)
            file.write(CONTENT)
    before = bench.hub.total_sent()
    bench.fetch()
    assert bench.is_right()
    assert bench.hub.total_sent() - before <= 192 * KIB


@pytest.mark.usefixtures("small_blocks")
def test_holes_in_a_copied_file_are_filled(bench: Bench) -> None:
    """Nothing is known of it but that zeros are unlikely."""
    bench.to.mkdir(parents=True)
    bench.file.write_bytes(CONTENT[: 128 * KIB] + bytes(128 * KIB) + CONTENT[256 * KIB : 400 * KIB])
    bench.fetch(repair=True)
    assert bench.is_right()
    assert bench.hub.total_sent() == 128 * KIB + len(CONTENT) - 400 * KIB


def test_a_newer_version_takes_the_place_of_what_was_fetched(bench: Bench) -> None:
    bench.fetch()
    new = model_bytes(3, SIZE + 8 * KIB)
    bench.hub.commit(REPO, {"m.gguf": new})
    bench.fetch()
    assert bench.file.read_bytes() == new
    assert "the hub has another version now" in bench.notes.said[0]


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_come_over_tls_with_the_companys_certificates(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = "-x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", *options.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    bench.hub.secure(certificate, key)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    listing = Listing(REPO, bench.hub.repos[REPO].head, (RemoteFile("m.gguf", len(CONTENT), None),))
    plan = plan_fetch(listing, quants_of(listing.files)[0], bench.to)
    fetch = Fetch(plan, Hub(bench.hub.endpoint, "hf_right"), bench.options, bench.notes)
    with pytest.raises(FetchError, match=r"the certificate of 127\.0\.0\.1:\d+ is not trusted .*SSL_CERT_FILE"):
        fetch.run()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    fetch.run()
    assert bench.is_right()


# ── Xet ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_xet_storage_is_the_way_where_the_plain_one_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.hub.add("a/xet", {"q/m.gguf": CONTENT}, xet=True)
    bench.hub.fault(Status(403), times=None)
    asked = []

    def hf_hub_download(
        repo: str, path: str, *, revision: str, local_dir: Path, endpoint: str, token: str | None
    ) -> str:
        asked.append((repo, path, revision, endpoint, token))
        (local_dir / "q").mkdir(parents=True)
        (local_dir / path).write_bytes(CONTENT)
        return str(local_dir / path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    bench.fetch(HubName("a/xet"))
    assert bench.is_right()
    assert asked == [("a/xet", "q/m.gguf", bench.hub.repos["a/xet"].head, bench.hub.endpoint, None)]
    assert bench.notes.said == ["m.gguf: the plain way is closed; getting it through Xet storage"]
    assert not (bench.to / WORK_FOLDER / "xet").exists()


@pytest.mark.parametrize(
    "trouble", [RuntimeError("no\n route"), PermissionError(13, "expired"), ValueError("no hf_xet")]
)
def test_where_no_way_is_open_it_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    bench.hub.add("a/xet", {"q/m.gguf": CONTENT}, xet=True)
    bench.hub.fault(Status(403), times=None)

    def hf_hub_download(*_: object, **__: object) -> str:
        raise trouble

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert "neither in the plain way nor through Xet storage" in bench.refusal(HubName("a/xet"))


def test_a_full_disk_is_one_in_xet_storage_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.hub.add("a/xet", {"q/m.gguf": CONTENT}, xet=True)
    bench.hub.fault(Status(403), times=None)

    def hf_hub_download(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert "the disk is full" in bench.refusal(HubName("a/xet"))
