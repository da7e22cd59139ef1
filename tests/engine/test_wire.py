"""The HTTP process' end of the connection: frames become events however the kernel cuts the stream."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.messages import Cancel, Event, Heartbeat, Started, Text, Timings
from server.engine.wire import EngineConnection, EngineSocket, encode_frame

EVENTS: list[Event] = [
    Started(1, 0, 10, 4, 0.5),
    Text(1, "größer", [1, 2], Timings(predicted_n=2)),
    Heartbeat(0.0, 7),
    Text(1, "x" * 300, [3], Timings(predicted_n=3)),
]


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=60),
)
def test_frames_cut_anywhere_become_the_same_events(sizes: list[int], cuts: list[int]) -> None:
    frames = [EVENTS[:n] for n in sizes]
    stream = b"".join(encode_frame(frame) for frame in frames)

    async def received() -> list[Event]:
        events: list[Event] = []
        connection = EngineConnection(events.append)
        at = i = 0
        while at < len(stream):
            n = cuts[i % len(cuts)]
            connection.data_received(stream[at : at + n])
            at, i = at + n, i + 1
        return events

    assert asyncio.run(received()) == [event for frame in frames for event in frame]


async def test_both_directions_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    engine = EngineSocket(theirs)
    events: list[Event] = []
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: EngineConnection(events.append), sock=ours
    )
    connection.send([Cancel(3)])
    assert await asyncio.to_thread(engine.receive, 5.0) == [Cancel(3)]
    engine.send(EVENTS)
    theirs.send(b"\x05\x00\x00")  # the beginning of a frame that never comes
    theirs.close()
    await asyncio.wait_for(connection.closed, 5)
    assert events == EVENTS
    connection.send([Cancel(4)])  # lost, and nobody minds


async def test_a_fault_of_ours_is_not_taken_for_the_end_of_the_engine() -> None:
    def take(event: Event) -> None:
        raise RuntimeError("a fault")

    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _, context: reported.append(context.get("exception")))
    ours, theirs = socket.socketpair()
    _, connection = await loop.create_connection(lambda: EngineConnection(take), sock=ours)
    theirs.send(encode_frame(EVENTS[:1]))
    with pytest.raises(RuntimeError, match="a fault"):
        await asyncio.wait_for(connection.closed, 5)
    theirs.close()
