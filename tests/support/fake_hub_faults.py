"""What may go wrong on the way to a hub: the faults that tests/support/fake_hub.py switches on for single requests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Status:
    """An answer with this status instead, e.g. 503, or 429 with {"Retry-After": "1"}."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Cut:
    """The connection closes after this many bytes of the body; `reset`: with a TCP reset."""

    after_bytes: int
    reset: bool = False


@dataclass(frozen=True)
class Flip:
    """The bit 0 of the byte at this offset of the file is wrong, if the answer holds it."""

    at: int


@dataclass(frozen=True)
class Slow:
    """A body comes at this rate."""

    bytes_per_s: int


@dataclass(frozen=True)
class Stall:
    """After this many bytes of the body nothing comes any more, until the hub closes or `hub.resume` is called."""

    after_bytes: int


@dataclass(frozen=True)
class IgnoreRange:
    """The range is not looked at: 200 and the whole file."""


@dataclass(frozen=True)
class OtherEtag:
    """Another ETag (X-Linked-Etag at the hub, ETag at the content network) than the file's."""

    etag: str = "0" * 64


@dataclass(frozen=True)
class WebPage:
    """200 and a login page, as a captive portal or a company proxy answers."""


Fault = Status | Cut | Flip | Slow | Stall | IgnoreRange | OtherEtag | WebPage
