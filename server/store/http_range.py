"""Ranges of a file over HTTP, straight into a buffer: the plain way that moves the most bytes for the least work.

A Link knows where the bytes of one file are. It asks the hub, follows its redirect to the content network, keeps that
(signed, expiring) address for later ranges, and asks again when it is refused. The token goes to the hub's own host
only. A Getter is one connection at a time, kept open from range to range; every thread has its own.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import os
import socket
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import server
from server.errors import FetchError

_MOST_REDIRECTS = 8
_USER_AGENT = f"glmserve/{server.__version__}"


class TryAgain(Exception):
    """What goes wrong today and not tomorrow. `after_s`: when the server says to come back."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after_s = after_s


class Refused(Exception):
    """The plain way is closed although the file is there: it may be got through Xet storage."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a repository at one commit. `etag`: the SHA-256 or the blob's id, as the hub's list gave it."""

    url: str  # its address at the hub
    name: str
    size: int
    etag: str | None
    token: str | None = field(repr=False)


class Answer(Protocol):
    """The bytes that a request brought. `whole`: the server sends the file from its start, whatever was asked."""

    whole: bool

    def read_into(self, view: memoryview) -> int:
        """How many bytes came; 0 at the end. Raises TryAgain."""


class Link:
    """Where the bytes of a file come from; several threads may use it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.has_xet = False
        self._direct: str | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> tuple[str, str | None]:
        """Where to ask now, and the token to show there."""
        with self._lock:
            return (self._direct, None) if self._direct else (self.source.url, self.source.token)

    def learn(self, url: str) -> None:
        with self._lock:
            self._direct = url

    def forget(self, url: str) -> None:
        """This address is refused: ask the hub for another."""
        with self._lock:
            if self._direct == url:
                self._direct = None


class Getter:
    """One connection at a time. `stop` may be called by another thread."""

    def __init__(self, link: Link, *, timeout_s: float, window_bytes: int = 4 << 20) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._window_bytes = window_bytes
        self._connection: http.client.HTTPConnection | None = None
        self._host: tuple[str, str] | None = None
        self._body: _Body | None = None
        self._stopped = threading.Event()

    def get(self, start: int, stop: int) -> Answer:
        """Ask for the bytes from `start` to `stop` (excluded). Raises TryAgain, Refused, FetchError."""
        if self._body is not None and self._body.left:
            self.close()  # what is left of the last answer is not wanted
        refused = 0
        while True:
            url, token = self._link.address
            answer = self._follow(url, token, start, stop)
            if answer is not None:
                return answer
            refused += 1
            if refused == 3:
                raise Refused

    def _follow(self, url: str, token: str | None, start: int, stop: int) -> Answer | None:
        """None: the address is refused, another one may be had."""
        source = self._link.source
        hub_host = urlsplit(source.url).netloc
        for _ in range(_MOST_REDIRECTS):
            response = self._ask(url, token, start, stop)
            if urlsplit(url).netloc == hub_host:
                self._check_identity(response)
            location = response.headers.get("Location")
            if response.status in (301, 302, 303, 307, 308) and location:
                self._drain(response)
                url = urljoin(url, location)
                if urlsplit(url).netloc != hub_host:
                    token = None
                    self._link.learn(url)
                continue
            return self._judge(response, url, start, stop)
        raise FetchError(f"{source.name}: {source.url} is redirected without end; give another HF_ENDPOINT")

    def _ask(self, url: str, token: str | None, start: int, stop: int) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            kept = self._host == (parts.scheme, parts.netloc)
            connection = self._connect(parts)
            try:
                return self._send(connection, parts, headers)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                if not kept:
                    raise
                self.close()  # a kept connection that the other side has closed meanwhile is no fault
                return self._send(self._connect(parts), parts, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _as_try_again(error, parts) from error

    def _send(
        self, connection: http.client.HTTPConnection, parts: SplitResult, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        proxied = _proxy_of(parts)
        extra = {}
        if proxied and parts.scheme == "http":
            target = parts._replace(fragment="").geturl()
            extra = _proxy_headers(proxied)
        connection.request("GET", target, headers={**headers, **extra})
        return connection.getresponse()

    def _connect(self, parts: SplitResult) -> http.client.HTTPConnection:
        if self._connection is not None and self._host == (parts.scheme, parts.netloc):
            return self._connection
        self.close()
        if self._stopped.is_set():
            raise ConnectionAbortedError("stopped")
        self._connection = connection = _connection_to(parts, self._timeout_s)
        self._host = (parts.scheme, parts.netloc)
        connection.connect()
        if connection.sock is not None:
            with suppress(OSError):
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # What the kernel holds for a reader that is killed is lost.
                if sys.platform == "linux":
                    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, self._window_bytes)
        if self._stopped.is_set():
            self.stop()
        return connection

    def _check_identity(self, response: http.client.HTTPResponse) -> None:
        """What the hub says of the file must be what its list said."""
        source = self._link.source
        self._link.has_xet |= response.headers.get("X-Xet-Hash") is not None
        told = response.headers.get("X-Linked-Etag") or ""
        told = told.removeprefix("W/").strip('"')
        if told and source.etag and told != source.etag and response.status < 400:
            self.close()
            raise FetchError(
                f"{source.name} has another ETag ({told[:12]}…) than in the hub's own list ({source.etag[:12]}…): the "
                f"file is just being replaced, or a mirror is behind; run the command again, or change HF_ENDPOINT"
            )

    def _judge(self, response: http.client.HTTPResponse, url: str, start: int, stop: int) -> Answer | None:
        source = self._link.source
        status = response.status
        if status in (200, 206):
            return self._accept(response, start, stop)
        after_s = retry_after_s(response.headers.get("Retry-After"))
        code = response.headers.get("X-Error-Code")
        self.close()  # whatever the body is, it is not read
        host = urlsplit(url).netloc
        if status in (408, 425, 429) or status >= 500:
            raise TryAgain(f"{host} answers {status} {response.reason}", after_s)
        if status in (400, 401, 403, 404, 410) and host != urlsplit(source.url).netloc:
            self._link.forget(url)
            return None
        if status in (401, 403):
            raise _not_allowed(source, status, code)
        if status == 416:
            raise FetchError(f"{source.name} is shorter at {host} than the hub's list says; run the command again")
        raise FetchError(f"{source.name} cannot be had: {host} answers {status} {response.reason} for {source.url}")

    def _accept(self, response: http.client.HTTPResponse, start: int, stop: int) -> Answer:
        source = self._link.source
        length = response.headers.get("Content-Length")
        if response.status == 206:
            told = response.headers.get("Content-Range", "")
            if told == f"bytes {start}-{stop - 1}/{source.size}":
                return self._keep(_Body(self, response, stop - start, whole=False))
            self.close()
            raise TryAgain(f"the answer has the range '{told}', but {start}-{stop - 1}/{source.size} was asked for")
        if length == str(source.size):
            return self._keep(_Body(self, response, source.size, whole=True))
        kind = response.headers.get("Content-Type", "")
        self.close()
        what = "a web page" if "html" in kind else f"{length or 'an unknown number of'} bytes"
        raise FetchError(
            f"{source.name}: instead of the file ({source.size:,} bytes) came {what}; a proxy or a login page is in "
            f"between, so set HTTPS_PROXY or NO_PROXY, or give a mirror with HF_ENDPOINT"
        )

    def _keep(self, body: _Body) -> Answer:
        self._body = body
        return body

    def _drain(self, response: http.client.HTTPResponse) -> None:
        """Read a short body, so that the connection can be used again."""
        try:
            response.read()
        except (OSError, http.client.HTTPException):
            self.close()

    def close(self) -> None:
        connection, self._connection, self._host, self._body = self._connection, None, None, None
        if connection is not None:
            connection.close()

    def stop(self) -> None:
        """End what another thread waits for."""
        self._stopped.set()
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Body:
    def __init__(self, getter: Getter, response: http.client.HTTPResponse, n_bytes: int, *, whole: bool) -> None:
        self.whole = whole
        self._getter = getter
        self._response = response
        self.left = n_bytes

    def read_into(self, view: memoryview) -> int:
        if not self.left:
            return 0
        try:
            n = self._response.fp.readinto1(view[: self.left])  # what is there, rather than waiting for a full view
        except (OSError, http.client.HTTPException) as error:
            self._getter.close()
            raise _as_try_again(error, None) from error
        if n == 0:
            self._getter.close()
            raise TryAgain("the connection was closed before the end")
        self.left -= n
        if not self.left:
            self._response.close()  # the connection stays open, and is free for the next request
        return n


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _connection_to(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """Through the proxy that the environment names, if any."""
    host, port = parts.hostname or "", parts.port
    if parts.scheme not in ("http", "https"):
        raise FetchError(f"'{parts.geturl()}' is neither http nor https; check HF_ENDPOINT")
    secure = parts.scheme == "https"
    proxy = _proxy_of(parts)
    if proxy is None:
        if secure:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_tls())
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    proxy_host, proxy_port = proxy.hostname or "", proxy.port
    if not secure:
        return http.client.HTTPConnection(proxy_host, proxy_port or 80, timeout=timeout_s)
    tunnel = http.client.HTTPSConnection(proxy_host, proxy_port or 80, timeout=timeout_s, context=_tls())
    tunnel.set_tunnel(host, port or 443, headers=_proxy_headers(proxy))
    return tunnel


def _proxy_of(parts: SplitResult) -> SplitResult | None:
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _tls() -> ssl.SSLContext:
    """The system's certificates, or those of SSL_CERT_FILE and SSL_CERT_DIR; certifi's where the system has none."""
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not (paths.cafile or (paths.capath and os.listdir(paths.capath))):
        import certifi

        context.load_verify_locations(certifi.where())
    return context


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def retry_after_s(text: str | None) -> float | None:
    """The header's seconds, or its date as seconds from now."""
    if not text:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, when.timestamp() - time.time())


def _as_try_again(error: OSError | http.client.HTTPException, parts: SplitResult | None) -> Exception:
    where = parts.netloc if parts else "the other side"
    match error:
        case ssl.SSLCertVerificationError():
            return FetchError(
                f"the certificate of {where} is not trusted ({error.verify_message}); name your company's certificates "
                f"with SSL_CERT_FILE"
            )
        case TimeoutError():
            return TryAgain(f"nothing came from {where} for too long")
        case socket.gaierror():
            return TryAgain(f"the name of {where} cannot be looked up")
        case http.client.IncompleteRead() | http.client.RemoteDisconnected():
            return TryAgain("the connection was closed before the end")
        case OSError():
            return TryAgain(f"{where}: {error.strerror or error}")
        case _:
            return TryAgain(f"{where} sent no proper HTTP ({error!r})")


def _not_allowed(source: Source, status: int, code: str | None) -> FetchError:
    page = source.url.partition("/resolve/")[0]
    if code == "GatedRepo" and status == 403:
        return FetchError(f"{source.name}: the token may not see this gated model; ask for access at {page}")
    if source.token is None:
        return FetchError(
            f"{source.name} is not given without a token ({status}): the model is gated or private; accept its terms "
            f"at {page}, then give a token with HF_TOKEN or --hf-token"
        )
    return FetchError(f"{source.name} is not given for this token ({status}); give another one with HF_TOKEN")
