"""WebSocket under a stream protocol: all frames, split anywhere, the closing handshake, pauses, hostile frames."""

from __future__ import annotations

import asyncio
import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.net.http.websocket import WebSocket
from gateway.net.listener import Server
from tests.support.listeners import BareServer
from tests.support.websocket import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, close_frame, frame, parse


class Wire(asyncio.Transport):
    """A socket's transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 5)})
        self.written = b""
        self.calls: list[str] = []
        self.limits: tuple[int | None, int | None] = (None, None)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.calls.append("set_protocol")

    def write(self, data: Any) -> None:
        assert not self.is_closing()
        self.written += bytes(data)

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.calls

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def resume_reading(self) -> None:
        self.calls.append("resume_reading")

    def is_reading(self) -> bool:
        return self.calls[-1] != "pause_reading"

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def frames(self) -> list[tuple[int, bytes]]:
        frames, rest = parse(self.written)
        assert rest == b""
        return frames


class User(asyncio.Protocol):
    """Keeps the calls that it gets."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.told: list[Any] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.told.append("made")

    def data_received(self, data: bytes) -> None:
        self.reads.append(bytes(data))

    def eof_received(self) -> None:
        self.told.append("eof")

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append(exc)


def opened(received: bytes = b"", listener: Server | None = None) -> tuple[WebSocket, Wire, User]:
    wire, user = Wire(), User()
    websocket = WebSocket(wire, user, listener or BareServer())
    websocket.start(received)
    return websocket, wire, user


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, bytes, list[bytes]]:
    """A stream of bytes, the frames it is sent in, with pings between them, and the pings' payloads."""
    wire, stream, pings = b"", b"", []
    for message in draw(st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), max_size=6)):
        for number, part in enumerate(message):
            wire += frame(part, CONTINUATION if number else BINARY, fin=number == len(message) - 1)
            stream += part
            if draw(st.booleans()):
                pings.append(draw(st.binary(max_size=125)))
                wire += frame(pings[-1], PING)
    return stream, wire, pings


@pytest.mark.clause("MQTT-6.0.0-2", "MQTT311-6.0.0-2")
@given(streams(), st.lists(st.integers(0, 3000)))
async def test_the_stream_is_the_same_however_it_is_framed_and_cut(sent: Any, cuts: list[int]) -> None:
    stream, wire, pings = sent
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    websocket, peer, user = opened()
    for start, end in itertools.pairwise(places):
        websocket.data_received(wire[start:end])
    assert b"".join(user.reads) == stream
    assert {opcode for opcode, _ in peer.frames()} <= {PONG}
    answered, asked = [payload for _, payload in peer.frames()], iter(pings)
    assert all(ping in asked for ping in answered), "in order; of several in one read only the newest"
    assert answered[-1:] == pings[-1:]
    byte_by_byte, second, other = opened()
    for at in range(len(wire)):
        byte_by_byte.data_received(wire[at : at + 1])
    assert b"".join(other.reads) == stream
    assert [payload for _, payload in second.frames()] == pings


@given(st.lists(st.one_of(st.binary(max_size=300), st.just(frame(b"x" * 130)), st.just(frame(b"y", fin=False)))))
async def test_no_bytes_make_it_fail(chunks: list[bytes]) -> None:
    websocket, peer, user = opened()
    for chunk in chunks:
        if not peer.is_closing():
            websocket.data_received(chunk)
    frames = peer.frames()
    if CLOSE in [opcode for opcode, _ in frames]:
        assert frames[-1][0] == CLOSE
        assert user.told == ["made", "eof"]
    websocket.connection_lost(None)
    assert user.told[-1] is None


BROKEN = {
    "reserved bit": (b"\xc2\x80" + b"mask", 1002),
    "unknown opcode": (b"\x83\x80" + b"mask", 1002),
    "not masked": (frame(b"a", masked=False), 1002),
    "continuation of nothing": (frame(b"a", CONTINUATION), 1002),
    "a message inside another": (frame(b"", fin=False) + frame(b"a"), 1002),
    "fragmented ping": (frame(b"a", PING, fin=False), 1002),
    "long ping": (frame(b"a" * 126, PING), 1002),
    "long length for few bytes": (struct.pack("!BBH", 0x82, 0xFE, 5), 1002),
    "length beyond 63 bits": (struct.pack("!BBQ", 0x82, 0xFF, 1 << 63), 1002),
    "one-byte close": (frame(b"a", CLOSE), 1002),
    "reserved close code": (close_frame(1005), 1002),
    "close reason no text": (frame(b"\x03\xe8\xff", CLOSE), 1007),
    "text": (frame(b"a", TEXT), 1003),
    "text in parts": (frame(b"a", TEXT, fin=False), 1003),
    "text that is none": (frame(b"\xff", TEXT), 1003),
    "text inside a binary message": (frame(b"", fin=False) + frame(b"a", TEXT), 1002),
    "eight bytes of length for two": (struct.pack("!BBQ", 0x82, 0xFF, 65535), 1002),
    "status code nobody may send": (close_frame(999), 1002),
    "status code of nobody yet": (close_frame(2999), 1002),
    "status code too high": (close_frame(5000), 1002),
}


@pytest.mark.clause("MQTT-6.0.0-1", "MQTT311-6.0.0-1")
@pytest.mark.parametrize("case", BROKEN)
async def test_anything_but_good_binary_frames_ends_the_connection(case: str) -> None:
    data, code = BROKEN[case]
    websocket, peer, user = opened()
    websocket.data_received(frame(b"good") + data + frame(b"not heard"))
    ((opcode, payload),) = peer.frames()
    assert (opcode, int.from_bytes(payload[:2])) == (CLOSE, code)
    payload[2:].decode()
    assert user.reads in ([b"good"], [b"good", b""])
    assert user.told == ["made", "eof"]
    websocket.write(b"not said")
    websocket.data_received(frame(b"not heard either"))
    websocket.close()
    assert peer.frames() == [(opcode, payload)]
    assert peer.is_closing()
    assert b"".join(user.reads) == b"good"


async def test_frames_behind_the_handshake_and_many_in_one_read_are_one_read() -> None:
    websocket, _, user = opened(frame(b"a") + frame(b"b")[:3])
    websocket.data_received(frame(b"b")[3:] + frame(b"") + frame(b"c") + frame(b"d", fin=False) + frame(b"", PONG))
    assert user.told == ["made"]
    assert user.reads == [b"a", b"bcd"]


async def test_a_part_of_a_frame_is_handed_on_at_once() -> None:
    websocket, _, user = opened()
    long = frame(b"0123456789" * 100_000)
    websocket.data_received(long[:1000])
    websocket.data_received(long[1000:2000])
    assert [len(read) for read in user.reads] == [1000 - 14, 1000]


@pytest.mark.parametrize(("said", "answer"), [(close_frame(1001, "bye"), b"\x03\xe9"), (frame(b"", CLOSE), b"")])
async def test_the_peer_closes(said: bytes, answer: bytes) -> None:
    websocket, peer, user = opened()
    websocket.data_received(frame(b"last") + said)
    ((opcode, payload),) = peer.frames()
    assert opcode == CLOSE
    assert payload.startswith(answer)
    assert peer.calls == ["set_protocol", "close"]
    assert user.reads == [b"last"]
    assert user.told == ["made", "eof"]
    websocket.data_received(frame(b"after its own end"))
    assert user.reads == [b"last"]


async def test_we_close_and_the_peers_answer_ends_it() -> None:
    websocket, peer, _ = opened()
    websocket.write(b"last")
    assert websocket.can_write_eof()
    websocket.write_eof()
    websocket.write(b"too late")
    websocket.data_received(frame(b"crossing") + frame(b"ping", PING))
    assert not peer.is_closing()
    assert peer.frames() == [(BINARY, b"last"), (CLOSE, b"\x03\xe8")]
    websocket.data_received(close_frame(1000))
    assert peer.is_closing()
    assert websocket.is_closing()
    assert len(peer.frames()) == 2


async def test_once_its_listener_has_stopped_we_close_for_a_restart() -> None:
    listener = BareServer()
    websocket, peer, _ = opened(listener=listener)
    listener.stop_accepting()
    websocket.write(b"last")
    websocket.close()
    assert peer.frames() == [(BINARY, b"last"), (CLOSE, b"\x03\xf4the gateway stops")]
    answering, other, _ = opened(listener=listener)
    answering.data_received(close_frame(1000))
    assert other.frames() == [(CLOSE, b"\x03\xe8")], "the peer's own word"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 1_000_000])
async def test_each_write_is_one_binary_message(size: int) -> None:
    websocket, peer, _ = opened()
    websocket.write(b"x" * size)
    websocket.writelines([b"y", b"z"])
    assert peer.frames() == [(BINARY, b"x" * size), (BINARY, b"yz")]


async def test_the_server_divides_a_write_into_messages() -> None:
    class Words(BareServer):
        def messages(self, data: bytes) -> list[bytes]:
            return data.split()

    websocket, peer, _ = opened(listener=Words())
    websocket.write(b"one two")
    websocket.writelines([b"thr", b"ee"])
    assert peer.frames() == [(BINARY, b"one"), (BINARY, b"two"), (BINARY, b"three")]


async def test_a_peer_that_reads_no_answers_gets_one_pong_when_it_does() -> None:
    websocket, peer, user = opened()
    websocket.pause_writing()
    for number in range(1000):
        websocket.data_received(frame(b"%d" % number, PING))
    assert peer.written == b""
    websocket.resume_writing()
    assert peer.frames() == [(PONG, b"999")]
    assert user.told == ["made", "pause", "resume"]


async def test_it_is_the_sockets_transport() -> None:
    websocket, peer, user = opened()
    websocket.set_write_buffer_limits(high=10, low=5)
    assert peer.limits == (10, 5)
    assert websocket.get_extra_info("peername") == ("10.0.0.1", 5)
    assert websocket.get_extra_info("peercert", "none") == "none"
    websocket.pause_reading()
    assert not websocket.is_reading()
    websocket.resume_reading()
    assert websocket.is_reading()
    websocket.write(b"ab")
    assert websocket.get_write_buffer_size() == 4
    assert websocket.eof_received() is False
    websocket.abort()
    error = OSError("reset")
    websocket.connection_lost(error)
    assert user.told == ["made", "eof", error]
    assert peer.calls == ["set_protocol", "pause_reading", "resume_reading", "abort"]
