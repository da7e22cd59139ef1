"""The two sites of the fake hub, the hub itself and its content network: HTTP in front of tests/support/fake_hub.py."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.fake_hub_faults import Cut, Flip, IgnoreRange, OtherEtag, Slow, Stall, Status, WebPage

if TYPE_CHECKING:
    from tests.support.fake_hub import FakeHub, File, Repo

_PIECE = 1 << 20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_PAGE = 1000  # entries of a tree listing in one answer


@dataclass
class Request:
    site: str  # "hub" or "cdn"
    method: str
    path: str
    range: str | None
    token: str | None
    headers: Mapping[str, str]
    status: int = 0
    n_bytes: int = 0  # of the body, as handed to the kernel


class Site(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: FakeHub, name: str, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.hub = hub
        self.name = name
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.context: ssl.SSLContext | None = None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._open: set[socket.socket] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.hang_up()
        self.server_close()

    def secure(self, certificate: Path, key: Path) -> None:
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(certificate, key)
        self.url = self.url.replace("http://", "https://")

    def hang_up(self) -> None:
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@dataclass
class _Refusal(Exception):
    status: int
    code: str | None
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def setup(self) -> None:
        if self.server.context is not None:
            self.request.settimeout(10)
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # what was handed to the kernel counts as sent, so little of it may wait there
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        if self.server.context is not None:
            self.request.close()

    def log_message(self, format: str, *args: Any) -> None:
        """The requests are recorded instead."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self._hub = hub = self.server.hub
        with hub.idle:
            hub.n_answering += 1
        try:
            self._answer_request()
        finally:
            with hub.idle:
                hub.n_answering -= 1
                hub.idle.notify_all()

    def _answer_request(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._request = Request(self.server.name, self.command, self.path, self.headers.get("Range"), token, headers)
        self._fault = self._hub.note(self._request)
        match self._fault:
            case Status(status, headers, body):
                self._send(status, body, headers)
            case WebPage():
                self._send(200, b"<!DOCTYPE html><html>Sign in</html>", {"Content-Type": "text/html"})
            case _ if self.server.name == "cdn":
                self._answer_cdn()
            case _:
                try:
                    self._answer_hub()
                except _Refusal as refusal:
                    self._refuse(refusal)

    def _refuse(self, refusal: _Refusal) -> None:
        headers = {"X-Error-Message": refusal.message, **refusal.headers}
        if refusal.code:
            headers["X-Error-Code"] = refusal.code
        self._send(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)

    # ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_hub(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path):
            repo_id, what, revision, rest = match.groups()
            found = self._find(repo_id, revision or "main", path, gate=False)
            match what:
                case "tree":
                    self._send_tree(*found, rest or "", query)
                case "paths-info":
                    self._send_paths(*found)
                case _:
                    self._send_info(repo_id, *found)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo_id, revision, name = match.groups()
            self._send_resolved(repo_id, *self._find(repo_id, revision, path, gate=True), name)
        else:
            self._send(404, b"", {"X-Error-Message": "no such page"})

    def _find(self, repo_id: str, revision: str, path: str, *, gate: bool) -> tuple[Repo, str]:
        hub, token = self._hub, self._request.token
        if token is not None and token not in hub.tokens and token != "hf_other":
            raise _Refusal(401, None, "Invalid credentials in Authorization header")
        if new := hub.new_name(repo_id):
            raise _Refusal(307, None, "moved", {"Location": path.replace(repo_id, new, 1)})
        repo = hub.repos.get(repo_id)
        if repo is None or (repo.private and token not in hub.tokens):
            if token is None:
                raise _Refusal(401, None, "Invalid username or password.")
            raise _Refusal(404, "RepoNotFound", "Repository not found")
        if repo.gated and gate and token not in hub.tokens:
            why = f"Access to model {repo_id} is restricted."
            raise _Refusal(403 if token else 401, "GatedRepo", why)
        commit = repo.head if revision == "main" else revision
        if commit not in repo.commits:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _send_info(self, repo_id: str, repo: Repo, commit: str) -> None:
        siblings = [file.sibling(path) for path, file in sorted(repo.commits[commit].items())]
        if "blobs" not in self.path:
            siblings = [{"rfilename": sibling["rfilename"]} for sibling in siblings]
        gated = "manual" if repo.gated else False
        info = {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": commit, "private": repo.private, "gated": gated,
                "disabled": False, "tags": ["gguf"], "siblings": siblings, "downloads": 1, "likes": 0}  # fmt: skip
        self._send_json(info)

    def _send_tree(self, repo: Repo, commit: str, folder: str, query: Mapping[str, str]) -> None:
        files = repo.commits[commit]
        prefix = f"{folder}/" if folder else ""
        recursive = query.get("recursive", "false").lower() == "true"
        entries: dict[str, dict[str, Any]] = {}
        for path, file in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            below = path.removeprefix(prefix).split("/")
            for depth in range(1, len(below) if recursive else min(len(below), 2)):
                name = prefix + "/".join(below[:depth])
                entries.setdefault(name, {"type": "directory", "oid": "0" * 40, "size": 0, "path": name})
            if recursive or len(below) == 1:
                entries[path] = file.described(path)
        if prefix and not entries:
            raise _Refusal(404, "EntryNotFound", f"{folder} does not exist on {commit}")
        start, limit = int(query.get("cursor", "0")), int(query.get("limit", str(_PAGE)))
        page = list(entries.values())[start : start + limit]
        headers = {}
        if start + limit < len(entries):
            parts = urlsplit(self.path)
            kept = "&".join(f"{key}={value}" for key, value in query.items() if key != "cursor")
            headers["Link"] = f'<{self.server.url}{parts.path}?{kept}&cursor={start + limit}>; rel="next"'
        self._send_json(page, headers)

    def _send_paths(self, repo: Repo, commit: str) -> None:
        if (self.headers.get("Content-Type") or "").startswith("application/json"):
            asked = json.loads(self._body)["paths"]
        else:
            asked = parse_qs(self._body.decode()).get("paths", [])
        files = repo.commits[commit]
        self._send_json([files[path].described(path) for path in asked if path in files])

    def _send_resolved(self, repo_id: str, repo: Repo, commit: str, path: str) -> None:
        file = repo.commits[commit].get(path)
        if file is None:
            raise _Refusal(404, "EntryNotFound", "Entry not found")
        etag = self._fault.etag if isinstance(self._fault, OtherEtag) else file.sha256 if file.lfs else file.oid
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if not file.lfs:
            self._send_file(file, headers)
            return
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{etag}"'}
        headers["Location"] = self._hub.signed(path, file)
        if repo.xet:
            headers["X-Xet-Hash"] = file.sha256[::-1]
            headers["X-Xet-Refresh-Route"] = f"{self.server.url}/api/models/{repo_id}/xet-read-token/{commit}"
        self._send(302, b"Found. Redirecting", headers)

    # ── the content network ──────────────────────────────────────────────────────────────────────────────────────────

    def _answer_cdn(self) -> None:
        file = self._hub.find_signed(self.path)
        if file is None:
            body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            self._send(403, body, {"Content-Type": "application/xml"})
            return
        etag = self._fault.etag if isinstance(self._fault, OtherEtag) else hashlib.md5(file.sha256.encode()).hexdigest()
        self._send_file(file, {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"})

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._send_head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self._request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_file(self, file: File, headers: Mapping[str, str]) -> None:
        start, stop, status = 0, file.size, 200
        match = _RANGE.fullmatch(self._request.range or "")
        changed = self.headers.get("If-Range") not in (None, headers["ETag"])
        if match and not changed and not isinstance(self._fault, IgnoreRange):
            first, last = match.groups()
            start = int(first) if first else max(0, file.size - int(last))
            stop = min(int(last) + 1, file.size) if first and last else file.size
            if start >= stop:
                self._send(416, b"", {"Content-Range": f"bytes */{file.size}"})
                return
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{file.size}"}
        self._send_head(status, stop - start, headers)
        if self.command != "HEAD":
            self._send_body(file.content, start, stop)

    def _send_body(self, content: bytes | Path, start: int, stop: int) -> None:
        end = stop
        match self._fault:
            case Cut(after_bytes) | Stall(after_bytes):
                end = min(stop, start + after_bytes)
        self.wfile.flush()
        if isinstance(content, Path):
            with open(content, "rb") as file:
                self._send_pieces(file.fileno(), start, end)
        else:
            self._send_pieces(content, start, end)
        match self._fault:
            case Cut(_, reset):
                if reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
            case Stall():
                self._hub.going_on.wait()
                self.close_connection = True

    def _send_pieces(self, source: bytes | int, start: int, stop: int) -> None:
        fault, sock = self._fault, self.connection
        piece = min(_PIECE, max(1, fault.bytes_per_s // 20)) if isinstance(fault, Slow) else _PIECE
        at = start
        while at < stop and not self._hub.closing.is_set():
            n = min(piece, stop - at)
            if isinstance(source, int) and not isinstance(fault, Flip):
                n = os.sendfile(sock.fileno(), source, at, n)
                if n == 0:
                    raise ConnectionAbortedError("the file is shorter than it was")
            else:
                data = bytearray(os.pread(source, n, at) if isinstance(source, int) else source[at : at + n])
                if isinstance(fault, Flip) and at <= fault.at < at + n:
                    data[fault.at - at] ^= 1
                sock.sendall(data)
            at += n
            self._hub.count(self._request, n)
            if isinstance(fault, Slow):
                self._hub.closing.wait(n / fault.bytes_per_s)
