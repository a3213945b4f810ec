"""Protocol headers, SASL, open, idle time-outs and close: everything before and around the links."""

from __future__ import annotations

import random
from typing import Any

import pytest
from proton import symbol

from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.events import (
    ConnectionOpened,
    SaslInitReceived,
    SaslResponseReceived,
    SessionEnded,
    TransfersReceived,
)
from protocols.amqp.outcomes import CONNECTION_FORCED, ILLEGAL_STATE, Error
from protocols.amqp.sasl import SaslCode
from protocols.connection import ConnectionClosed, ConnectionFailed

AMQP = b"AMQP\x00\x01\x00\x00"
SASL = b"AMQP\x03\x01\x00\x00"
OUTCOME_OK = b"\x00\x53\x44\xc0\x03\x01\x50\x00"
OUTCOME_AUTH = b"\x00\x53\x44\xc0\x03\x01\x50\x01"


def sasl_frame(frames: Any, code: int, *items: bytes) -> bytes:
    return frames.frame(frames.performative(code, *items), kind=1)


def init(frames: Any, mechanism: str, response: bytes) -> bytes:
    return sasl_frame(frames, 0x41, frames.symbol(mechanism), frames.binary(response))


@pytest.mark.clause("AMQP-2.2")
@pytest.mark.parametrize(
    "first",
    [
        b"AMQP\x00\x00\x09\x01",  # AMQP 0-9-1
        b"AMQP\x02\x01\x00\x00",  # the TLS layer of AMQP
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x10\x10\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00\x01x",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"\x00",
    ],
)
def test_a_wrong_header_is_answered_with_the_right_one(make_server: Any, first: bytes) -> None:
    for by_byte in (False, True):
        server = make_server()
        for part in [first[i : i + 1] for i in range(len(first))] if by_byte else [first]:
            server.feed(part)
        assert server.connection.data_to_send() == AMQP
        assert server.connection.closing
        assert [type(event) for event in server.events] == [ConnectionFailed]


@pytest.mark.clause("AMQP-2.2")
def test_amqp_without_sasl_where_it_is_required(make_server: Any) -> None:
    server = make_server(allow_without_sasl=False)
    server.feed(AMQP)
    assert server.connection.data_to_send() == SASL
    assert server.connection.closing


def test_without_sasl_where_allowed(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    make_peer(server, sasl=None).open()
    peer = make_peer(server := make_server(), sasl=None)
    peer.open()
    peer.run()
    (opened,) = server.of(ConnectionOpened)
    assert opened.container_id == "client"
    assert not opened.with_sasl


def run_splits(make_server: Any, make_peer: Any, split: Any) -> tuple[list[bytes], list[str], bytes]:
    server = make_server()
    peer = make_peer(server, split)
    session = peer.open()
    sender = peer.sender(session)
    peer.run()
    for number in range(3):
        peer.transfer(sender, f"d{number}")
    peer.run()
    peer.connection.close()
    peer.run()
    others = [type(event).__name__ for event in server.events if not isinstance(event, TransfersReceived)]
    return [transfer.data for transfer in server.received], others, bytes(peer.from_server)


def test_splitting_changes_nothing(make_server: Any, make_peer: Any) -> None:
    whole = run_splits(make_server, make_peer, None)
    assert len(whole[0]) == 3
    by_byte = run_splits(make_server, make_peer, lambda data: [data[i : i + 1] for i in range(len(data))])
    assert by_byte == whole
    rng = random.Random(5)

    def anywhere(data: bytes) -> list[bytes]:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(5))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    for _ in range(20):
        assert run_splits(make_server, make_peer, anywhere) == whole


@pytest.mark.clause("AMQP-5.3.2")
def test_the_handler_decides_the_sasl_outcome(make_server: Any, frames: Any) -> None:
    server = make_server(mechanisms=("PLAIN", "ANONYMOUS"))
    server.answers = False
    server.feed(SASL + init(frames, "PLAIN", b"\0ann\0secret") + frames.begin())
    offer = server.connection.data_to_send()
    assert offer.startswith(SASL)
    assert b"\x05PLAIN\x09ANONYMOUS" in offer
    assert server.events == [SaslInitReceived("PLAIN", b"\0ann\0secret")]
    assert OUTCOME_OK not in offer
    # Bytes that arrive before the SASL outcome are read only after it.
    events = server.connection.sasl_outcome(SaslCode.OK)
    assert [type(event) for event in events] == [ConnectionOpened]
    assert events[0].with_sasl
    answer = server.connection.data_to_send()
    assert OUTCOME_OK in answer
    assert answer.index(OUTCOME_OK) < answer.index(AMQP)


def test_sasl_refusal_closes(make_server: Any, frames: Any) -> None:
    server = make_server(mechanisms=("PLAIN",))
    server.answers = False
    server.feed(SASL + init(frames, "PLAIN", b"\0ann\0wrong") + frames.begin())
    events = server.connection.sasl_outcome(SaslCode.AUTH)
    assert [type(event) for event in events] == [ConnectionFailed]
    assert server.connection.data_to_send().endswith(OUTCOME_AUTH)
    assert server.connection.closing
    assert server.feed(frames.begin()) == []


def test_a_mechanism_that_was_not_offered(make_server: Any, frames: Any) -> None:
    server = make_server(mechanisms=("PLAIN",))
    server.feed(SASL + init(frames, "ANONYMOUS", b"x"))
    assert [type(event) for event in server.events] == [ConnectionFailed]
    assert server.connection.data_to_send().endswith(OUTCOME_AUTH)


@pytest.mark.clause("AMQP-5.3.3.3")
def test_challenge_rounds(make_server: Any, frames: Any) -> None:
    server = make_server(mechanisms=("SCRAM-SHA-256",))
    server.answers = False
    server.feed(SASL + init(frames, "SCRAM-SHA-256", b"first"))
    assert server.connection.sasl_challenge(b"salt") == []
    assert b"\x00\x53\x42\xc0\x07\x01\xa0\x04salt" in server.connection.data_to_send()
    server.feed(sasl_frame(frames, 0x43, frames.binary(b"proof")))
    assert server.events[-1] == SaslResponseReceived(b"proof")
    assert server.connection.sasl_outcome(SaslCode.OK, b"v=sig") == []
    assert server.connection.data_to_send().endswith(b"\xa0\x05v=sig")
    server.feed(frames.begin())
    assert server.of(ConnectionOpened)[0].with_sasl


@pytest.mark.parametrize("case", ["type", "twice", "order", "large", "fields", "short", "text"])
def test_bad_sasl_frames_close(make_server: Any, frames: Any, case: str) -> None:
    server = make_server(mechanisms=("PLAIN",))
    server.answers = False
    good = init(frames, "PLAIN", b"\0a\0b")
    bad = {
        "type": frames.frame(frames.performative(0x41, frames.symbol("PLAIN"))),
        "twice": good,
        "order": sasl_frame(frames, 0x43, frames.binary(b"x")),
        "large": b"\x7f\xff\xff\xff\x02\x01\x00\x00",
        "fields": sasl_frame(frames, 0x41, frames.string("PLAIN")),
        "short": b"\x00\x00\x00\x03\x02\x01\x00\x00",
        "text": sasl_frame(frames, 0x41, b"\xa3\x01\xff"),
    }[case]
    if case == "twice":
        server.feed(SASL + good)
        server.connection.sasl_challenge(b"c")
        server.feed(bad)
    else:
        server.feed(SASL + bad)
    assert isinstance(server.events[-1], ConnectionFailed)
    assert server.connection.closing


def test_bytes_before_the_sasl_outcome_are_limited(make_server: Any, frames: Any) -> None:
    server = make_server(mechanisms=("PLAIN",))
    server.answers = False
    server.feed(SASL + init(frames, "PLAIN", b"\0a\0b"))
    for _ in range(100):
        server.feed(bytes(1000))
    assert isinstance(server.events[-1], ConnectionFailed)
    assert server.connection.closing


def test_open_must_come_in_time(make_server: Any) -> None:
    server = make_server(open_timeout_s=5.0)
    assert server.connection.next_deadline() == 1005.0
    server.feed(SASL)
    assert server.connection.tick(1004.9) == []
    (event,) = server.connection.tick(1005.0)
    assert isinstance(event, ConnectionFailed)
    assert server.connection.closing


@pytest.mark.clause("AMQP-2.4.5")
def test_idle_time_outs_and_heartbeats(make_server: Any, make_peer: Any) -> None:
    server = make_server(limits=EndpointLimits(idle_timeout_s=60))
    peer = make_peer(server)
    peer.transport.idle_timeout = 40
    peer.open()
    peer.run()
    assert peer.transport.remote_idle_timeout == 30  # half of it is announced
    # The peer announced 20 s: we send an empty frame every 10.
    last = now = 1000.0
    gaps = []
    while now < 1100:
        deadline = server.connection.next_deadline()
        assert deadline is not None
        assert now < deadline
        now = deadline
        assert server.connection.tick(now) == []
        peer.server.feed(b"\x00\x00\x00\x08\x02\x00\x00\x00")  # the peer's own heartbeat
        if data := server.connection.data_to_send():
            assert data == b"\x00\x00\x00\x08\x02\x00\x00\x00"
            gaps.append(now - last)
            last = now
    assert gaps
    assert max(gaps) <= 15
    events = [event for later in range(1101, 1240) for event in server.connection.tick(float(later))]
    assert [type(event) for event in events] == [ConnectionFailed]
    assert "idle" in events[0].reason
    assert server.connection.closing


def test_close_by_the_peer(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    peer.open()
    peer.run()
    peer.connection.close()
    peer.run()
    assert server.events[-1] == ConnectionClosed("")
    assert server.connection.closing
    assert not peer.connection.state & peer.connection.REMOTE_ACTIVE


def test_close_by_us_says_why(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    peer.open()
    peer.run()
    server.connection.close(Error(CONNECTION_FORCED, "stopping"))
    peer.run()
    condition = peer.connection.remote_condition
    assert (condition.name, condition.description) == (CONNECTION_FORCED, "stopping")


def test_what_open_says(make_server: Any, make_peer: Any) -> None:
    server = make_server(limits=EndpointLimits(max_frame_bytes=4096, channel_max=3))
    peer = make_peer(server)
    peer.connection.properties = {symbol("x"): 1}
    peer.connection.desired_capabilities = [symbol("ANONYMOUS-RELAY")]
    peer.open()
    peer.run()
    assert len(server.of(ConnectionOpened)) == 1
    assert peer.connection.remote_container == "server"
    assert peer.connection.remote_properties == {symbol("product"): "test"}
    assert peer.transport.remote_max_frame_size == 4096
    assert peer.transport.remote_channel_max == 3


def test_eof_without_a_close(make_server: Any, make_peer: Any) -> None:
    for stage in (b"", AMQP, SASL):
        server = make_server()
        server.feed(stage)
        assert [type(event) for event in server.connection.receive_eof()] == [ConnectionFailed]
    server = make_server()
    make_peer(server).open()
    assert [type(event) for event in server.connection.receive_eof()] == [ConnectionFailed]


def test_a_begin_before_the_open(make_server: Any, frames: Any) -> None:
    """The peer must send its open first (part 2.4.1)."""
    server = make_server()
    begin = frames.frame(frames.performative(0x11, frames.NULL, b"\x43", frames.uint(10), frames.uint(10)))
    server.feed(frames.HEADER + begin + frames.attach())
    assert server.events == [ConnectionFailed("a begin before the open", ILLEGAL_STATE)]
    # proton writes no close to a peer that has not opened; the socket is closed.
    assert [code for code, _ in frames.parse(server.connection.data_to_send())] == [0x10]
    assert server.connection.closing
    assert server.feed(frames.begin()) == []


def test_sessions_end(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    session = peer.open()
    peer.sender(session)
    peer.run()
    session.close()
    peer.run()
    (ended,) = server.of(SessionEnded)
    assert [link.name for link in ended.links] == ["s"]
    assert not server.links["s"].attached
    assert server.is_empty_of_links
    assert not server.engine._sessions


def test_a_container_id_that_is_no_text(make_server: Any, frames: Any) -> None:
    server = make_server()
    server.feed(frames.HEADER + frames.frame(frames.performative(0x10, b"\xa1\x02\xff\xfe")))
    assert isinstance(server.events[-1], ConnectionFailed)
    assert server.connection.closing
