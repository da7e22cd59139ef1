"""Headers of files at the hub, read without the files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.errors import FetchError
from server.gguf import read_header, read_header_from
from server.store.hub import Hub
from server.store.names import HubName
from server.store.remote import RemoteReader
from tests.support.fake_hub import Cut, FakeHub, IgnoreRange, Status
from tests.support.gguf_bytes import Gguf, Tensor

REPO = "a/b"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Gguf(tensors=[Tensor("t", (1 << 20,), n_bytes=4 << 20)]).write(tmp_path / "m.gguf")


@pytest.fixture
def hub(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with FakeHub() as hub:
        hub.add(REPO, {"m.gguf": path})
        yield hub


def reader(hub: FakeHub) -> RemoteReader:
    at = Hub(hub.endpoint)
    listing = at.list_files(HubName(REPO))
    return RemoteReader(at.source(listing, listing.files[0]), sleep=lambda _: None)


def test_a_header_costs_little_of_the_file(hub: FakeHub, path: Path) -> None:
    with reader(hub) as remote:
        header = read_header_from(remote, "m.gguf")
        assert remote.n_read < 200_000
    here = read_header(path)
    assert (header.tensors, header.metadata, header.file_bytes) == (here.tensors, here.metadata, here.file_bytes)
    ranges = [
        (request.range or "").removeprefix("bytes=").split("-") for request in hub.requests if request.site == "cdn"
    ]
    assert sum(int(last) + 1 - int(first) for first, last in ranges) == remote.n_read


def test_it_reads_as_a_file_does(hub: FakeHub, path: Path) -> None:
    content = path.read_bytes()
    with reader(hub) as remote:
        assert remote.seek(-10, io.SEEK_END) == len(content) - 10
        assert remote.read(100) == content[-10:]
        assert remote.read(1) == b""
        assert remote.seek(5) == 5
        assert remote.read(3) == content[5:8]
        assert remote.seek(2, io.SEEK_CUR) == 10
        assert remote.read(0) == b""


def test_trouble_on_the_line_is_waited_out(hub: FakeHub, path: Path) -> None:
    hub.fault(Status(503), times=2)
    hub.fault(Cut(10), times=2)
    with reader(hub) as remote:
        assert remote.read(1000) == path.read_bytes()[:1000]
    hub.fault(Status(503), times=None)
    with reader(hub) as remote, pytest.raises(FetchError, match=r"m\.gguf cannot be read at the hub: .* answers 503"):
        remote.read(10)


def test_what_cannot_be_read_in_places_is_told(hub: FakeHub) -> None:
    hub.fault(IgnoreRange(), times=None)
    with reader(hub) as remote:
        assert remote.read(4) == b"GGUF"
        with pytest.raises(FetchError, match="the server sends whole files only"):
            remote.read(4)
    hub.clear_faults()
    hub.fault(Status(403), times=None)
    with reader(hub) as remote, pytest.raises(FetchError, match="fetch it, and give its path"):
        remote.read(4)
