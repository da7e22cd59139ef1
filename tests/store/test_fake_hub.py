"""The fake hub answers as huggingface_hub expects it of the real one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from tests.support.fake_hub import Cut, FakeHub, Flip, IgnoreRange, OtherEtag, Slow, Status

REPO = "unsloth/GLM-GGUF"
SHARD = "Q4_K_M/m-00001-of-00002.gguf"
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add(REPO, {SHARD: CONTENT, "Q4_K_M/m-00002-of-00002.gguf": b"two", "README.md": b"# GLM"})
        yield hub


def get(url: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[HTTPResponse, bytes]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=10)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", headers=headers or {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def link(hub: FakeHub) -> str:
    response, _ = get(f"{hub.endpoint}/{REPO}/resolve/main/{SHARD}", method="HEAD")
    assert response.status == 302
    return response.headers["Location"]


def test_the_client_lists_and_describes(hub: FakeHub) -> None:
    api = HfApi(endpoint=hub.endpoint, token=False)
    info = api.model_info(REPO, files_metadata=True)
    assert info.sha == hub.repos[REPO].head
    sizes = {each.rfilename: (each.size, each.lfs and each.lfs.sha256) for each in info.siblings or []}
    assert sizes[SHARD] == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert sizes["README.md"] == (5, None)
    tree = list(api.list_repo_tree(REPO, recursive=True))
    assert [each.path for each in tree] == ["Q4_K_M", SHARD, "Q4_K_M/m-00002-of-00002.gguf", "README.md"]
    assert [each.path for each in api.list_repo_tree(REPO)] == ["Q4_K_M", "README.md"]
    (file,) = api.get_paths_info(REPO, [SHARD, "nowhere"])
    assert isinstance(file, RepoFile)
    assert file.size == len(CONTENT)


def test_the_client_downloads_and_keeps_its_token_from_the_content_network(hub: FakeHub, tmp_path: Path) -> None:
    path = hf_hub_download(REPO, SHARD, endpoint=hub.endpoint, token="hf_right", cache_dir=tmp_path)
    assert Path(path).read_bytes() == CONTENT
    assert {request.token for request in hub.requests if request.site == "hub"} == {"hf_right"}
    assert {request.token for request in hub.requests if request.site == "cdn"} == {None}
    assert hub.total_sent() == len(CONTENT)


def test_gates_and_missing_things(hub: FakeHub) -> None:
    hub.add("a/gated", {"m.gguf": b"x"}, gated=True)
    hub.add("a/private", {"m.gguf": b"x"}, private=True)
    api = HfApi(endpoint=hub.endpoint, token=False)
    assert api.model_info("a/gated").gated == "manual"
    with pytest.raises(GatedRepoError):
        api.get_hf_file_metadata(url=f"{hub.endpoint}/a/gated/resolve/main/m.gguf")
    with pytest.raises(GatedRepoError, match="403"):
        api.get_hf_file_metadata(url=f"{hub.endpoint}/a/gated/resolve/main/m.gguf", token="hf_other")
    with pytest.raises(HfHubHTTPError, match="401"):
        api.model_info("a/private")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("a/none", token="hf_right")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="nope")
    with pytest.raises(HfHubHTTPError, match="401"):
        api.model_info(REPO, token="hf_wrong")
    assert api.model_info("a/private", token="hf_right").private


def test_revisions_and_renames(hub: FakeHub) -> None:
    api = HfApi(endpoint=hub.endpoint, token=False)
    first = api.model_info(REPO).sha
    second = hub.commit(REPO, {SHARD: b"new"})
    assert first != second == api.model_info(REPO).sha
    (old,) = api.get_paths_info(REPO, [SHARD], revision=first)
    assert isinstance(old, RepoFile)
    assert old.size == len(CONTENT)
    hub.rename(REPO, "unsloth/New-GGUF")
    assert api.model_info(REPO).id == "unsloth/New-GGUF"


def test_ranges(hub: FakeHub, tmp_path: Path) -> None:
    response, body = get(link(hub), {"Range": "bytes=10-19"})
    assert (response.status, body) == (206, CONTENT[10:20])
    assert response.headers["Content-Range"] == f"bytes 10-19/{len(CONTENT)}"
    assert get(link(hub), {"Range": "bytes=10230-"})[1] == CONTENT[10230:]
    assert get(link(hub), {"Range": "bytes=-5"})[1] == CONTENT[-5:]
    assert get(link(hub), {"Range": "bytes=10240-"})[0].status == 416
    assert get(link(hub), {"Range": "bytes=1-2", "If-Range": '"other"'})[0].status == 200
    (tmp_path / "file").write_bytes(CONTENT)
    hub.commit(REPO, {SHARD: tmp_path / "file"})
    assert get(link(hub), {"Range": "bytes=10-19"})[1] == CONTENT[10:20]


def test_links_expire(hub: FakeHub) -> None:
    old = link(hub)
    assert get(old)[0].status == 200
    hub.expire_links()
    assert get(old)[0].status == 403
    assert get(link(hub))[0].status == 200
    assert get(link(hub).replace("Signature=", "Signature=0"))[0].status == 403


def test_faults_are_counted_and_chosen(hub: FakeHub) -> None:
    hub.fault(Status(429, {"Retry-After": "1"}), on="00001", skip=1, times=2)
    answers = [get(link(hub))[0] for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 429, 429, 200]
    assert answers[1].headers["Retry-After"] == "1"
    hub.fault(Cut(100))
    with pytest.raises(IncompleteRead) as caught:
        get(link(hub))
    assert len(caught.value.partial) == 100
    hub.fault(Cut(100, reset=True))
    with pytest.raises((ConnectionResetError, IncompleteRead)):
        get(link(hub))
    hub.fault(Flip(11))
    body = get(link(hub), {"Range": "bytes=10-19"})[1]
    assert body == bytes([10, 10, 12, 13, 14, 15, 16, 17, 18, 19])
    hub.fault(IgnoreRange())
    response, body = get(link(hub), {"Range": "bytes=10-19"})
    assert (response.status, body) == (200, CONTENT)
    hub.fault(OtherEtag("f" * 64), site="hub", method="HEAD")
    response, _ = get(f"{hub.endpoint}/{REPO}/resolve/main/{SHARD}", method="HEAD")
    assert response.headers["X-Linked-Etag"] == f'"{"f" * 64}"'
    hub.fault(Slow(1_000_000))
    assert get(link(hub))[1] == CONTENT
    hub.fault(Status(500), times=None)
    assert {get(link(hub))[0].status for _ in range(3)} == {500}
    hub.clear_faults()
    assert get(link(hub))[0].status == 200
