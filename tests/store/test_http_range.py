"""The plain way for bytes: proxies, certificates, kept connections, odd answers."""

from __future__ import annotations

import email.utils
import ssl
import time
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from server.errors import FetchError
from server.store import http_range
from server.store.http_range import Getter, Link, Refused, Source, TryAgain, retry_after_s
from server.store.pace import Pace
from tests.support.fake_hub import FakeHub, IgnoreRange, Status

CONTENT = bytes(range(256)) * 8
REPO = "a/b"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FakeHub() as hub:
        hub.add(REPO, {"m.gguf": CONTENT, "small.txt": b"hello"})
        yield hub


def link_to(hub: FakeHub, endpoint: str | None = None, path: str = "m.gguf", size: int = len(CONTENT)) -> Link:
    url = f"{endpoint or hub.endpoint}/{REPO}/resolve/main/{path}"
    return Link(Source(url, path, size, None, "hf_right"))


def read(getter: Getter, start: int, stop: int) -> bytes:
    answer = getter.get(start, stop)
    buffer = bytearray()
    view = memoryview(bytearray(100))
    while n := answer.read_into(view):
        buffer += view[:n]
    return bytes(buffer)


def test_a_connection_is_kept_and_the_link_too(hub: FakeHub) -> None:
    getter = Getter(link_to(hub), timeout_s=5)
    assert read(getter, 0, 300) == CONTENT[:300]
    assert read(getter, 1000, 2048) == CONTENT[1000:]
    answer = getter.get(0, 2000)
    answer.read_into(memoryview(bytearray(10)))  # the rest is not wanted
    assert read(getter, 5, 6) == CONTENT[5:6]
    getter.close()
    assert [request.site for request in hub.requests] == ["hub", "cdn", "cdn", "cdn", "cdn"]
    assert [request.token for request in hub.requests] == ["hf_right", None, None, None, None]


def test_a_kept_connection_that_was_closed_is_opened_again(hub: FakeHub) -> None:
    getter = Getter(link_to(hub), timeout_s=5)
    assert read(getter, 0, 10) == CONTENT[:10]
    hub.hang_up()
    assert read(getter, 10, 20) == CONTENT[10:20]
    getter.close()


def test_a_mirror_may_answer_itself(hub: FakeHub) -> None:
    getter = Getter(link_to(hub, path="small.txt", size=5), timeout_s=5)
    assert read(getter, 1, 4) == b"ell"
    getter.close()
    assert [request.site for request in hub.requests] == ["hub"]


def test_a_proxy_is_asked_where_the_environment_names_one(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake hub stands in for a proxy: it answers for whatever host the request line names."""
    proxy = hub.endpoint.replace("http://", "http://user:p%40ss@")
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    getter = Getter(link_to(hub, endpoint="http://models.invalid"), timeout_s=5)
    assert read(getter, 0, 10) == CONTENT[:10]
    getter.close()
    first, second = hub.requests
    assert first.path == f"http://models.invalid/{REPO}/resolve/main/m.gguf"
    assert first.headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"
    assert (second.site, second.path.startswith("/")) == ("cdn", True)


def test_a_tunnel_goes_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "")
    connection = http_range._connection_to(urlsplit("https://hub.invalid/x"), 5)
    assert (connection.host, connection.port) == ("proxy.invalid", 3128)
    assert vars(connection)["_tunnel_host"] == "hub.invalid"


def test_only_http_is_spoken(hub: FakeHub) -> None:
    with pytest.raises(FetchError, match="neither http nor https; check HF_ENDPOINT"):
        read(Getter(link_to(hub, endpoint="ftp://x"), timeout_s=5), 0, 1)


def test_an_untrusted_certificate_says_what_to_set() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    told = http_range._as_try_again(error, urlsplit("https://hub.invalid/x"))
    assert isinstance(told, FetchError)
    assert "the certificate of hub.invalid is not trusted (self-signed certificate)" in told.message
    assert "SSL_CERT_FILE" in told.message


def test_other_troubles_are_for_another_try() -> None:
    for error, words in (
        (TimeoutError(), "nothing came from"),
        (IncompleteRead(b""), "closed before the end"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
    ):
        told = http_range._as_try_again(error, None)
        assert isinstance(told, TryAgain)
        assert words in told.reason


def test_an_unknown_host_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def fail(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("http.client.HTTPConnection.connect", fail)
    with pytest.raises(TryAgain, match=r"the name of hub\.invalid cannot be looked up"):
        read(Getter(link_to(hub, endpoint="http://hub.invalid"), timeout_s=5), 0, 1)


def test_the_systems_certificates_or_certifis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert http_range._tls().verify_mode is ssl.CERT_REQUIRED
    nowhere = ssl.DefaultVerifyPaths("", str(tmp_path), "", "", "", "")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nowhere)
    assert http_range._tls().get_ca_certs()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Status(206, {"Content-Range": "bytes 0-9/10"}), TryAgain, "'bytes 0-9/10', but 0-9/2048 was asked for"),
        (Status(416), FetchError, "is shorter at"),
        (Status(200, {}, b"x" * 7), FetchError, r"instead of the file \(2,048 bytes\) came 7 bytes"),
        (Status(404), Refused, "^$"),
        (Status(418), FetchError, "cannot be had: 127.0.0.1:.* answers 418"),
        (Status(302, {"Location": "/again"}), FetchError, "redirected without end"),
        (Status(429, {"Retry-After": "9"}), TryAgain, "answers 429"),
    ],
)
def test_odd_answers(hub: FakeHub, fault: Status, error: type[Exception], words: str) -> None:
    hub.fault(fault, times=None)
    getter = Getter(link_to(hub), timeout_s=5)
    with pytest.raises(error, match=words) as caught:
        getter.get(0, 10)
    if isinstance(caught.value, TryAgain) and fault.status == 429:
        assert caught.value.after_s == 9.0
    getter.close()


def test_refusals_of_the_hub_itself_are_final(hub: FakeHub) -> None:
    hub.fault(Status(404), site="hub", times=None)
    with pytest.raises(FetchError, match="answers 404"):
        Getter(link_to(hub), timeout_s=5).get(0, 10)
    hub.clear_faults()
    hub.fault(Status(403), site="hub", times=None)
    with pytest.raises(FetchError, match=r"is not given for this token \(403\)"):
        Getter(link_to(hub), timeout_s=5).get(0, 10)


def test_whole_files_are_marked(hub: FakeHub) -> None:
    hub.fault(IgnoreRange())
    getter = Getter(link_to(hub), timeout_s=5)
    assert getter.get(10, 20).whole
    assert not getter.get(10, 20).whole
    getter.close()


def test_a_stopped_getter_opens_nothing(hub: FakeHub) -> None:
    getter = Getter(link_to(hub), timeout_s=5)
    getter.stop()
    with pytest.raises(TryAgain, match="stopped"):
        getter.get(0, 10)
    assert hub.requests == []


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("7") == 7.0
    assert retry_after_s(None) is None
    assert retry_after_s("soon") is None
    date = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 50 < (retry_after_s(date) or 0) <= 60
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_a_pace_is_shared() -> None:
    pace = Pace(1000.0)
    assert pace.debt_s(500) <= 0.5
    assert 0.2 < pace.debt_s(500) <= 1.0
    assert pace.piece(1 << 20) == 1024
    free = Pace(None)
    assert (free.debt_s(1 << 30), free.piece(1 << 20)) == (0.0, 1 << 20)
