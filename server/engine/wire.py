"""Frames between the two processes: four bytes of length, little-endian, then msgpack. A frame carries a list of
messages, so that one step is one system call."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from server.engine.messages import Command, Event
from server.engine.options import EngineOptions

_LENGTH = struct.Struct("<I")


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a new engine process."""

    options: EngineOptions


_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[Event])
_commands = msgspec.msgpack.Decoder(list[Command])
_configure = msgspec.msgpack.Decoder(Configure)


def encode_frame(messages: Sequence[msgspec.Struct] | Configure) -> bytes:
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


class EngineSocket:
    """The engine's end, blocking. `send` may be called from two threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._received = bytearray()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN | select.POLLHUP)

    def send(self, events: Sequence[Event]) -> None:
        frame = encode_frame(events)
        with self._sending:
            self._sock.sendall(frame)

    def receive_options(self) -> EngineOptions:
        body = self._receive_frame()
        if body is None:
            raise EOFError("the server closed the connection before it sent its options")
        return _configure.decode(body).options

    def receive(self, timeout_s: float) -> list[Command] | None:
        """Commands of the next frame; [] when none came in time; None when the other side is gone."""
        # A socket timeout would hold for the sending thread too, so wait for the first byte with poll instead.
        if len(self._received) < _LENGTH.size and not self._readable.poll(timeout_s * 1e3):
            return []
        body = self._receive_frame()
        return None if body is None else _commands.decode(body)

    def _receive_frame(self) -> bytes | None:
        if not self._fill(_LENGTH.size):
            return None
        (n,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + n
        if not self._fill(end):
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def _fill(self, n: int) -> bool:
        while len(self._received) < n:
            chunk = self._sock.recv(1 << 16)
            if not chunk:
                return False
            self._received += chunk
        return True


class EngineConnection(asyncio.Protocol):
    """The HTTP process' end. `take` gets each event as it arrives; `closed` is done when the connection has ended, with
    the exception that ended it if it was ours."""

    def __init__(self, take: Callable[[Event], None]) -> None:
        self._take = take
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        received, start, end = self._received, 0, len(self._received)
        while end - start >= _LENGTH.size:
            (n,) = _LENGTH.unpack_from(received, start)
            body = start + _LENGTH.size
            if end - body < n:
                break
            start = body + n
            for event in _events.decode(received[body:start]):
                self._take(event)
        del received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if error is None or isinstance(error, OSError):  # the engine is gone
            self.closed.set_result(None)
        else:
            self.closed.set_exception(error)

    def send(self, messages: Sequence[msgspec.Struct] | Configure) -> None:
        """Never waits; what is sent after the end is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(messages))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
