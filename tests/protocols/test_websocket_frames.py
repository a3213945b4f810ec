"""A client's WebSocket frames: the same however they are split, as wsproto writes and reads them; and each fault."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, TextMessage
from wsproto.events import Ping as PingEvent
from wsproto.utilities import generate_accept_token

from protocols.websocket import CLOSE, PING, PONG, FrameFault, FrameReader, accept_token, close_frame, write_frame
from tests.support.websocket import BINARY, CONTINUATION, TEXT, frame
from tests.support.websocket import close_frame as clients_close

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 124, 125, 126, 127, 300, 65535, 65536, 70000])


def read(data: bytes, cuts: list[int]) -> tuple[bytes, list[bytes], bytes | None, FrameFault | None]:
    """Read `data` in pieces; returns the stream, each piece's newest ping, and the end."""
    reader = FrameReader()
    stream, pings = b"", []
    places = [*sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    start = 0
    for place in places:
        received = reader.receive(data[start:place])
        start = place
        stream += received.payload
        if received.ping is not None:
            pings.append(received.ping)
        if received.close is not None or received.fault is not None:
            return stream, pings, received.close, received.fault
    return stream, pings, None, None


WHOLE = (
    frame(b"one")
    + frame(b"p" * 125, PING)
    + frame(b"t" * 126, fin=False)
    + frame(b"", PING)
    + frame(b"", CONTINUATION, fin=False)
    + frame(b"wo", CONTINUATION)
    + frame(b"", PONG)
    + frame(b"")
    + clients_close(1001, "bye")
)


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_every_cut_in_two_gives_the_same(cut: int) -> None:
    stream, pings, close, fault = read(WHOLE, [cut])
    assert stream == b"one" + b"t" * 126 + b"wo"
    assert pings[-1] == b""
    assert (close, fault) == (b"\x03\xe9bye", None)


def test_byte_by_byte() -> None:
    stream, pings, close, fault = read(WHOLE, list(range(len(WHOLE))))
    assert stream == b"one" + b"t" * 126 + b"wo"
    assert pings == [b"p" * 125, b""]
    assert (close, fault) == (b"\x03\xe9bye", None)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=5), st.lists(st.integers(0, 400_000), max_size=8))
def test_frames_of_wsproto_are_read(messages: list[tuple[int, bool]], cuts: list[int]) -> None:
    client = Connection(ConnectionType.CLIENT)
    data, stream = b"", b""
    for number, (size, finished) in enumerate(messages):
        payload = bytes((number + 1,)) * size
        data += client.send(BytesMessage(payload, message_finished=finished))
        data += client.send(PingEvent(bytes(payload[:125])))
        stream += payload
    data += client.send(CloseConnection(1000, "done"))
    assert read(data, []) == (stream, [bytes((len(messages),)) * min(125, messages[-1][0])] if messages else [],
                              b"\x03\xe8done", None)  # fmt: skip
    found, _, close, fault = read(data, cuts)
    assert (found, close, fault) == (stream, b"\x03\xe8done", None)


@given(
    st.lists(st.lists(st.text(max_size=200), min_size=1, max_size=4), max_size=5),
    st.lists(st.integers(0, 9000), max_size=8),
)
def test_text_messages_end_where_wsproto_ends_them(messages: list[list[str]], cuts: list[int]) -> None:
    client = Connection(ConnectionType.CLIENT)
    data = b""
    for parts in messages:
        for number, part in enumerate(parts, 1):
            data += client.send(TextMessage(part, message_finished=number == len(parts)))
    reader = FrameReader(TEXT)
    found, message, start = [], b"", 0
    for place in [*sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]:
        received = reader.receive(data[start:place])
        start = place
        at = 0
        for end in received.ends:
            found.append(message + received.payload[at:end])
            message, at = b"", end
        message += received.payload[at:]
    assert found == ["".join(parts).encode() for parts in messages]
    assert message == b""


def test_a_reader_of_text_refuses_binary_messages() -> None:
    received = FrameReader(TEXT).receive(frame(b"one", TEXT) + frame(b"two"))
    assert (received.payload, received.ends) == (b"one", (3,))
    assert received.fault == FrameFault(1003, "text frames only")


@given(st.text(st.characters(max_codepoint=126, min_codepoint=33), max_size=40))
def test_the_opening_handshake_is_answered_as_by_wsproto(key: str) -> None:
    assert accept_token(key) == generate_accept_token(key.encode()).decode()


@given(SIZES)
def test_wsproto_reads_our_frames(size: int) -> None:
    client = Connection(ConnectionType.CLIENT)
    client.receive_data(write_frame(BINARY, b"x" * size) + write_frame(PING, b"y") + close_frame(1002, "why"))
    message, ping, close = _joined(client)
    assert message == b"x" * size
    assert ping == b"y"
    assert (close.code, close.reason) == (1002, "why")


def _joined(client: Connection) -> tuple[bytes, bytes, CloseConnection]:
    payload, ping = b"", b""
    for event in client.events():
        if isinstance(event, BytesMessage):
            payload += event.data
        elif isinstance(event, PingEvent):
            ping = bytes(event.payload)
        elif isinstance(event, CloseConnection):
            return payload, ping, event
    raise AssertionError("no close")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xc2", 1002),
        (b"\x83", 1002),
        (b"\x09", 1002),
        (b"\x80", 1002),
        (b"\x81", 1003),
        (b"\x82\x00", 1002),
        (b"\x89\xfe", 1002),
        (struct.pack("!BBH", 0x82, 0xFE, 125), 1002),
        (struct.pack("!BBQ", 0x82, 0xFF, 0xFFFF), 1002),
        (struct.pack("!BBQ", 0x82, 0xFF, 1 << 63), 1002),
        (frame(b"", fin=False) + b"\x82", 1002),
        (frame(b"", fin=False) + frame(b"", TEXT)[:1], 1002),
        (frame(b"a", CLOSE), 1002),
        *((clients_close(number), 1002) for number in (0, 999, 1004, 1005, 1006, 1015, 2999, 5000)),
        (frame(b"\x03\xe8\xff", CLOSE), 1007),
    ],
)
def test_a_fault_is_found_with_the_byte_that_makes_it(data: bytes, code: int) -> None:
    for cuts in ([], list(range(3, 3 + len(data)))):
        stream, _, close, fault = read(frame(b"") + frame(b"good") + data, cuts)
        assert stream == b"good"
        assert close is None
        assert fault is not None
        assert fault.code == code
        assert len(close_frame(fault.code, fault.reason)) <= 127
    reader = FrameReader()
    before = reader.receive(data[:-1]) if len(data) > 1 else None
    assert before is None or before.fault is None


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1011, 1014, 3000, 4999])
def test_valid_status_codes(code: int) -> None:
    assert read(clients_close(code), [])[2:] == (struct.pack("!H", code), None)
