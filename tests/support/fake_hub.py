"""A model hub on loopback that speaks the hub's HTTP API as huggingface_hub uses it, with faults that tests switch on.

    with FakeHub() as hub:
        hub.add("unsloth/GLM-5.2-GGUF", {"UD-Q4_K_M/m-00001-of-00002.gguf": b"...", "README.md": Path("x")})
        environment = {"HF_ENDPOINT": hub.endpoint}         # or hf_api = HfApi(endpoint=hub.endpoint)
        hub.fault(Cut(after_bytes=1000), on="00001", times=2)   # the next two answers with that file break off
        ...
        hub.requests            # what was asked: site, method, path, range, token, status, body bytes sent
        hub.bytes_sent          # file bytes sent by the content network, all requests together; total_sent() at the end

There are two sites on two ports, as in life: the hub itself (`/api/models/...`, `/REPO/resolve/REVISION/PATH`) and the
content network that it redirects to for every .gguf (LFS) file, with URLs that are signed and expire. Both answer range
requests, so a header can be read without the rest of a file. Contents are bytes or paths of files; paths go out with
sendfile. `hub.commit` replaces files under a new revision (old ones stay until `forget_old`), `hub.rename` leaves a
redirect behind, `gated` and `private` repos want one of `tokens`. Faults (fake_hub_faults.py) come one at a time: the
first one that matches a request and has times left.

As a process of its own (for measurements): python -m tests.support.fake_hub REPO PATH=FILE... [--port N]; it prints its
address. Facts of the protocol are from huggingface_hub's client code and the hub's public answers.
"""

from __future__ import annotations

import argparse
import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, urlsplit

from tests.support.fake_hub_faults import Cut, Fault, Flip, IgnoreRange, OtherEtag, Slow, Stall, Status, WebPage
from tests.support.fake_hub_sites import Request, Site

__all__ = ["Cut", "FakeHub", "Flip", "IgnoreRange", "OtherEtag", "Request", "Slow", "Stall", "Status", "WebPage"]

Content = bytes | Path


@dataclass
class _Armed:
    fault: Fault
    on: str
    site: str | None
    method: str | None
    skip: int
    times: int | None


@dataclass
class File:
    content: Content
    size: int
    sha256: str
    lfs: bool

    @property
    def oid(self) -> str:
        return self.sha256[:40]  # stands for git's own hash of the blob

    def described(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "oid": self.oid, "size": self.size, "path": path}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 135}
        return entry

    def sibling(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": path, "size": self.size, "blobId": self.oid}
        if self.lfs:
            entry["lfs"] = {"sha256": self.sha256, "size": self.size, "pointerSize": 135}
        return entry


@dataclass
class Repo:
    gated: bool
    private: bool
    xet: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    head: str = ""


def _file(path: str, content: Content | File) -> File:
    if isinstance(content, File):  # with a sum that is not the content's: of a sparse file of many GiB, say
        return content
    if isinstance(content, bytes):
        return File(content, len(content), hashlib.sha256(content).hexdigest(), path.endswith(".gguf"))
    with open(content, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(content, content.stat().st_size, digest, path.endswith(".gguf"))


class FakeHub:
    def __init__(self, *, port: int = 0, tokens: tuple[str, ...] = ("hf_right",), link_s: float = 3600.0) -> None:
        """`link_s`: how long a signed URL of the content network is good for."""
        self.tokens = tokens
        self.link_s = link_s
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self._renamed: dict[str, str] = {}
        self._by_sha: dict[str, File] = {}
        self._armed: list[_Armed] = []
        self._lock = threading.Lock()
        self._generation = 0
        self.idle = threading.Condition()
        self.n_answering = 0
        self.closing = threading.Event()
        self.going_on = threading.Event()
        self._hub = Site(self, "hub", port)
        self._cdn = Site(self, "cdn", 0)

    @property
    def endpoint(self) -> str:
        return self._hub.url

    @property
    def cdn(self) -> str:
        return self._cdn.url

    @property
    def bytes_sent(self) -> int:
        with self._lock:
            return sum(request.n_bytes for request in self.requests if request.site == "cdn")

    def total_sent(self) -> int:
        """As bytes_sent, once every answer has ended: a client may have its bytes before the hub has counted them."""
        with self.idle:
            assert self.idle.wait_for(lambda: self.n_answering == 0, timeout=10)
        return self.bytes_sent

    def __enter__(self) -> Self:
        for site in (self._hub, self._cdn):
            site.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.going_on.set()
        for site in (self._hub, self._cdn):
            site.stop()

    # ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        repo_id: str,
        files: Mapping[str, Content | File],
        *,
        gated: bool = False,
        private: bool = False,
        xet: bool = False,
    ) -> str:
        """A repository with these files; returns its commit. `xet` adds the headers of Xet storage."""
        self.repos[repo_id] = Repo(gated, private, xet)
        return self.commit(repo_id, files)

    def commit(self, repo_id: str, files: Mapping[str, Content | File], *, forget_old: bool = False) -> str:
        """Replace or add files; returns the new commit."""
        repo = self.repos[repo_id]
        old = repo.commits.get(repo.head, {})
        new = old | {path: _file(path, content) for path, content in files.items()}
        told = "".join(f"{path}{file.sha256}" for path, file in sorted(new.items())) + repo.head
        if forget_old:
            repo.commits.clear()
        repo.head = hashlib.sha1(told.encode()).hexdigest()
        repo.commits[repo.head] = new
        self._by_sha |= {file.sha256: file for file in new.values()}
        return repo.head

    def rename(self, old: str, new: str) -> None:
        self.repos[new] = self.repos.pop(old)
        self._renamed[old] = new

    def expire_links(self) -> None:
        """Every signed URL that was given out is refused from now on."""
        self._generation += 1

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def fault(
        self,
        fault: Fault,
        *,
        on: str = "",
        site: str | None = "cdn",
        method: str | None = "GET",
        skip: int = 0,
        times: int | None = 1,
    ) -> None:
        """The next `times` (None: all) requests of this site and method with `on` in their path get the fault, after
        `skip` that do not."""
        self._armed.append(_Armed(fault, on, site, method, skip, times))

    def clear_faults(self) -> None:
        self._armed.clear()

    def secure(self, certificate: Path, key: Path) -> None:
        """Speak TLS from now on."""
        for site in (self._hub, self._cdn):
            site.secure(certificate, key)

    def hang_up(self) -> None:
        """Close every connection that is open."""
        for site in (self._hub, self._cdn):
            site.hang_up()

    def resume(self) -> None:
        """Let stalled answers go on."""
        self.going_on.set()

    def _take_fault(self, request: Request) -> Fault | None:
        with self._lock:
            for armed in self._armed:
                if armed.times == 0 or armed.on not in request.path:
                    continue
                if armed.site not in (None, request.site) or armed.method not in (None, request.method):
                    continue
                if armed.skip:
                    armed.skip -= 1
                    continue
                if armed.times is not None:
                    armed.times -= 1
                return armed.fault
        return None

    # ── what the sites ask ───────────────────────────────────────────────────────────────────────────────────────────

    def note(self, request: Request) -> Fault | None:
        fault = self._take_fault(request)
        with self._lock:
            self.requests.append(request)
        return fault

    def count(self, request: Request, n_bytes: int) -> None:
        with self._lock:
            request.n_bytes += n_bytes

    def new_name(self, repo_id: str) -> str | None:
        return self._renamed.get(repo_id)

    def signed(self, path: str, file: File) -> str:
        expires = int(time.time() + self.link_s)
        name = quote(path.rpartition("/")[2])
        query = f"Expires={expires}&Signature={self._signature(file.sha256, expires)}&name={name}"
        return f"{self.cdn}/{file.sha256}?{query}"

    def find_signed(self, path: str) -> File | None:
        """The file of a signed URL, or None when the signature is wrong or no longer good."""
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        sha256 = parts.path.lstrip("/")
        expires = int(query.get("Expires", ["0"])[0])
        good = query.get("Signature") == [self._signature(sha256, expires)] and time.time() < expires
        return self._by_sha.get(sha256) if good else None

    def _signature(self, sha256: str, expires: int) -> str:
        return hashlib.sha256(f"{sha256}{expires}{self._generation}".encode()).hexdigest()[:32]


def main() -> None:
    parser = argparse.ArgumentParser(description="a fake model hub")
    parser.add_argument("repo")
    parser.add_argument("files", nargs="+", help="PATH-IN-REPO=FILE")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    with FakeHub(port=options.port) as hub:
        pairs = (text.partition("=") for text in options.files)
        hub.add(options.repo, {path: Path(file) for path, _, file in pairs})
        print(hub.endpoint, flush=True)
        hub.closing.wait()


if __name__ == "__main__":
    main()
