"""The limits of what one peer can make us store and send, for everything whose number the peer chooses."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocols.amqp import outcomes
from protocols.amqp.endpoints import LEAST_IDLE_MS, UNANSWERED_LIMIT, EndpointLimits
from protocols.amqp.events import (
    ConnectionOpened,
    LinkDetached,
    LinkRequested,
    TransferAborted,
)
from protocols.amqp.native import lib
from protocols.amqp.outcomes import Error
from protocols.connection import ConnectionFailed
from tests.support.amqp_frames import DATA

PART = 1000


def begin(frames: Any, channel: int = 0) -> bytes:
    return frames.frame(frames.performative(0x11, frames.NULL, b"\x43", frames.uint(1000), frames.uint(1000)), channel)


def opened(make_server: Any, frames: Any, *, max_frame: int | None = None, idle_ms: int = 0, **options: Any) -> Any:
    """A server with these limits that has received an open and a begin."""
    server = make_server(**options)
    fields = [
        frames.string("limited"),
        frames.string("localhost"),
        frames.NULL if max_frame is None else frames.uint(max_frame),
        frames.NULL,
        frames.uint(idle_ms) if idle_ms else frames.NULL,
    ]
    feed(server, frames.HEADER + frames.frame(frames.performative(0x10, *fields)))
    feed(server, begin(frames))
    return server


def feed(server: Any, data: bytes) -> bytes:
    """Write the output after each read, as the pump does."""
    if not server.connection.closing:
        server.feed(data)
    return bytes(server.connection.data_to_send())


def codes(frames: Any, data: bytes) -> list[int]:
    return [code for code, _ in frames.parse(data)]


@pytest.mark.clause("AMQP-2.7.1")
def test_a_channel_above_channel_max(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, limits=EndpointLimits(channel_max=1))
    assert codes(frames, feed(server, begin(frames, 1))).count(0x11) == 1
    answer = feed(server, begin(frames, 2))
    assert server.of(ConnectionFailed)[0].code == outcomes.FRAMING_ERROR
    assert codes(frames, answer) == [0x18]


def test_many_begins_on_one_channel(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, limits=EndpointLimits(channel_max=3))
    answers = b"".join(feed(server, begin(frames)) for _ in range(10))
    assert codes(frames, answers).count(0x11) == 3  # the first session is another one
    assert server.of(ConnectionFailed)[0].code == outcomes.NOT_ALLOWED


def test_a_session_that_has_ended_does_not_count(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, limits=EndpointLimits(channel_max=0))
    for _ in range(10):
        feed(server, frames.frame(frames.performative(0x17)))
        assert codes(frames, feed(server, begin(frames))).count(0x11) == 1
    assert not server.of(ConnectionFailed)


def test_links_that_the_peer_does_not_detach_are_bounded(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, limits=EndpointLimits(links_per_session=1))
    tried = 0
    while not server.connection.closing:
        feed(server, frames.attach(f"l{tried}", tried))
        tried += 1
    assert tried == 1 + UNANSWERED_LIMIT + 1
    assert len(server.of(LinkRequested)) == 1
    assert server.of(ConnectionFailed)[0].code == outcomes.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.parametrize("ending", ["detach", "end"])
def test_links_that_it_does_detach_are_not(make_server: Any, frames: Any, ending: str) -> None:
    server = opened(make_server, frames, limits=EndpointLimits(links_per_session=1))
    feed(server, frames.attach("first", 0))
    for number in range(1, 2 * UNANSWERED_LIMIT):
        feed(server, frames.attach(f"l{number}", 1))
        if ending == "detach":
            feed(server, frames.frame(frames.performative(0x16, frames.uint(1), frames.TRUE)))
        else:
            feed(server, frames.frame(frames.performative(0x17)))
            feed(server, begin(frames) + frames.attach("first", 0))
    assert not server.of(ConnectionFailed)


def partial(server: Any, frames: Any, links: int, parts: int) -> int:
    """Start a message on each of `links` links; return the number of the next delivery."""
    for handle in range(links):
        feed(server, frames.attach(f"l{handle}", handle))
    for handle in range(links):
        for part in range(parts):
            feed(server, frames.transfer(handle, bytes(PART), more=True, handle=handle, first=part == 0))
    return links


def kept(server: Any) -> int:
    return sum(len(link.partial or b"") for link in server.links.values())


def test_partial_messages_of_all_links_together_are_bounded(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, limit=10 * PART, limits=EndpointLimits(partial_bytes=20 * PART))
    number = partial(server, frames, links=10, parts=2)
    assert kept(server) == 20 * PART
    assert not server.of(LinkDetached)
    answer = feed(server, frames.transfer(3, bytes(PART), more=True, handle=3, first=False))
    (detached,) = server.of(LinkDetached)
    assert (detached.link.name, detached.error.condition) == ("l3", outcomes.RESOURCE_LIMIT_EXCEEDED)
    assert 0x16 in codes(frames, answer)
    assert kept(server) == 18 * PART
    # The other links work on, and so does a link with a small message.
    feed(server, frames.transfer(4, DATA, handle=4, first=False))
    feed(server, frames.transfer(number, DATA, handle=4))
    assert [len(event.data) for event in server.received] == [2 * PART + len(DATA), len(DATA)]
    assert not server.of(ConnectionFailed)


@pytest.mark.parametrize("ending", ["completed", "aborted", "detached", "ended", "too large"])
def test_the_memory_of_a_partial_message_is_released(make_server: Any, frames: Any, ending: str) -> None:
    server = opened(make_server, frames, limit=4 * PART, limits=EndpointLimits(partial_bytes=4 * PART))
    number = partial(server, frames, links=1, parts=4)
    if ending == "completed":
        feed(server, frames.transfer(0, b"", handle=0, first=False))
        assert len(server.received) == 1
    elif ending == "aborted":
        feed(server, frames.transfer(0, b"", handle=0, first=False, aborted=True))
        assert len(server.of(TransferAborted)) == 1
    elif ending == "detached":
        feed(server, frames.frame(frames.performative(0x16, frames.uint(0), frames.TRUE)))
    elif ending == "ended":
        feed(server, frames.frame(frames.performative(0x17)))
        feed(server, begin(frames))
        number = 0
    else:
        feed(server, frames.transfer(0, bytes(PART), handle=0, first=False, more=True))
    assert kept(server) == 0
    feed(server, frames.attach("next", 7))
    for part in range(4):
        feed(server, frames.transfer(number, bytes(PART), handle=7, more=True, first=part == 0))
    assert kept(server) == 4 * PART
    assert "next" not in [event.link.name for event in server.of(LinkDetached)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # classes, which have no state
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["part", "last", "abort", "detach"])), max_size=40))
def test_the_count_of_partial_bytes_is_exact(make_server: Any, frames: Any, steps: list[tuple[int, str]]) -> None:
    """On three links, with a limit that some messages exceed, and a common limit that sometimes detaches a link."""
    limits = EndpointLimits(partial_bytes=5 * PART)
    server = opened(make_server, frames, limit=3 * PART, credit=1000, limits=limits)
    numbers: dict[int, int] = {}  # the incomplete delivery, by handle
    names: dict[int, str] = {}
    deliveries = 0
    for at, (handle, step) in enumerate(steps):
        if handle not in names:
            names[handle] = f"l{at}"
            feed(server, frames.attach(names[handle], handle))
        if step == "detach":
            feed(server, frames.frame(frames.performative(0x16, frames.uint(handle), frames.TRUE)))
            del names[handle]
            numbers.pop(handle, None)
        else:
            first = handle not in numbers
            if first:
                numbers[handle], deliveries = deliveries, deliveries + 1
            ended = step != "part"
            body = b"" if step == "abort" else bytes(PART)
            options = {"handle": handle, "more": not ended, "first": first, "aborted": step == "abort"}
            feed(server, frames.transfer(numbers[handle], body, **options))
            if ended:
                del numbers[handle]
        assert not server.of(ConnectionFailed)
        held = sum(len(link.partial or b"") for link in server.engine._links.values())
        assert server.engine._partial_bytes == held <= 5 * PART


def test_a_message_in_single_bytes_takes_no_more_than_its_size(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, limit=PART)
    feed(server, frames.attach())
    body = bytes(range(250)) * 4
    for at in range(PART):
        feed(server, frames.transfer(0, body[at : at + 1], more=True, first=at == 0))
    link = server.links["s"]
    assert bytes(link.partial) == body
    assert link.partial.__sizeof__() < 2 * PART
    feed(server, frames.transfer(0, b"", first=False))
    assert [event.data for event in server.received] == [body]


@pytest.mark.clause("AMQP-2.4.5")
@pytest.mark.parametrize(("idle_ms", "good"), [(1, False), (LEAST_IDLE_MS - 1, False), (LEAST_IDLE_MS, True)])
def test_an_idle_time_out_that_would_keep_us_busy(make_server: Any, frames: Any, idle_ms: int, good: bool) -> None:
    server = opened(make_server, frames, idle_ms=idle_ms)
    assert bool(server.of(ConnectionOpened)) is good
    if not good:
        assert server.of(ConnectionFailed)[0].code == outcomes.NOT_ALLOWED


@pytest.mark.clause("AMQP-2.4.1")
@pytest.mark.parametrize("max_frame", [512, 1000])
def test_no_frame_is_larger_than_the_peer_takes(make_server: Any, frames: Any, max_frame: int) -> None:
    server = opened(make_server, frames, max_frame=max_frame)
    feed(server, frames.attach("r", 0, sending=False))
    flow = (b"\x43", frames.uint(100), b"\x43", frames.uint(100), b"\x43", b"\x43", frames.uint(5))
    feed(server, frames.frame(frames.performative(0x13, *flow)))
    body = bytes(range(256)) * 20
    server.engine.send(server.links["r"], [body], ["token"])
    data = server.connection.data_to_send()
    sizes, payload, at = [], b"", 0
    while at < len(data):
        size = struct.unpack_from(">I", data, at)[0]
        frame = data[at + 8 : at + size]
        assert frame[:3] == b"\x00\x53\x14"
        payload += frame[5 + frame[4] :]  # after the transfer's list, which is a short one
        sizes.append(size)
        at += size
    assert max(sizes) == max_frame
    assert payload == body


def test_the_reason_of_a_detach_fits_the_smallest_frame(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, max_frame=512)
    feed(server, frames.attach("s", 0))
    server.engine.close_link(server.links["s"], Error(outcomes.NOT_FOUND, "\U0001f600" * 1000))
    answer = server.connection.data_to_send()
    assert codes(frames, answer) == [0x16]
    assert len(answer) <= 512


@pytest.mark.parametrize("part", [PART, 2 * PART])
def test_what_a_detached_link_still_gets_is_dropped(make_server: Any, frames: Any, part: int) -> None:
    """The peer has credit and has not read our detach, or does not care about it."""
    server = opened(make_server, frames, limit=4 * PART, credit=1000)
    feed(server, frames.attach("s", 0))
    link = server.links["s"]
    feed(server, frames.transfer(0, bytes(part), more=True))
    server.engine.close_link(link, Error(outcomes.NOT_ALLOWED))
    feed(server, frames.transfer(0, bytes(part), first=False))
    for number in range(1, 100):
        feed(server, frames.transfer(number, bytes(part), more=number % 3 == 0))
        if number % 3 == 0:
            feed(server, frames.transfer(number, bytes(part), aborted=number % 2 == 0, first=False))
        assert lib.pn_session_incoming_bytes(link.session.handle) == 0
    assert not server.received
    assert not server.of(ConnectionFailed)
    feed(server, frames.frame(frames.performative(0x16, b"\x43", frames.TRUE)))
    assert server.is_empty_of_links


def test_a_peer_that_ignores_a_detach_is_bounded(make_server: Any, frames: Any) -> None:
    server = opened(make_server, frames, credit=10)
    feed(server, frames.attach("s", 0))
    server.engine.close_link(server.links["s"], Error(outcomes.NOT_ALLOWED))
    sent = 0
    while not server.connection.closing:
        feed(server, frames.transfer(sent, DATA))
        sent += 1
    assert sent == 10 + UNANSWERED_LIMIT + 1
    assert server.of(ConnectionFailed)[0].code == outcomes.TRANSFER_LIMIT_EXCEEDED


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("large", ["name", "address"])
def test_an_attach_that_the_peer_could_not_take(make_server: Any, frames: Any, refused: bool, large: str) -> None:
    """Part 2.8.15: an attach cannot be split, so the connection ends, and no frame above the peer's limit is sent."""
    limits = EndpointLimits(links_per_session=0 if refused else 1)
    server = opened(make_server, frames, max_frame=512, limits=limits)
    name = "n" * 250 if large == "name" else "n"
    target = b"\xb1" + struct.pack(">I", 450) + b"a" * 450 if large == "address" else frames.string("a" * 250)
    attach = frames.performative(
        0x12,
        frames.string(name),
        b"\x43",
        frames.TRUE,  # the peer receives: our answer has its target
        frames.NULL,
        frames.NULL,
        b"\x00\x53\x28" + frames.listed(frames.string("t")),
        b"\x00\x53\x29" + frames.listed(target),
    )
    answer = feed(server, frames.frame(attach))
    assert codes(frames, answer) == [0x18]
    assert outcomes.FRAME_SIZE_TOO_SMALL.encode() in answer
    assert server.connection.closing
