"""A windowed MQTT 5 publisher and a subscriber on bare sockets, fast enough not to be the bottleneck.

They share no code with the gateway: packets are written down here once more, from the standard.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from typing import cast

from loadtest.clients.pace import Pace
from loadtest.report import Latencies

CHUNK = 2000  # messages written at once at the most


def _varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | (128 if value else 0))
        if not value:
            return bytes(out)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack(">H", len(raw)) + raw


def _packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + _varint(len(body)) + body


def connect_packet(client_id: str, user: str | None = None, password: str | None = None) -> bytes:
    """CONNECT, MQTT 5, clean start, keep alive 60 s."""
    flags = 0x02 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    body = _text("MQTT") + bytes((5, flags)) + struct.pack(">H", 60) + b"\0" + _text(client_id)
    for part in (user, password):
        if part is not None:
            body += _text(part)
    return _packet(0x10, body)


class Splitter:
    """Cuts a byte stream into (first byte, body) pairs."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The packets that are complete now."""
        buffer = self._buffer + data
        packets = []
        position = 0
        while len(buffer) - position >= 2:
            length, shift, cursor = 0, 0, position + 1
            while cursor < len(buffer) and buffer[cursor] & 0x80:
                length |= (buffer[cursor] & 0x7F) << shift
                shift += 7
                cursor += 1
            if cursor >= len(buffer):
                break
            length |= buffer[cursor] << shift
            end = cursor + 1 + length
            if end > len(buffer):
                break
            packets.append((buffer[position], buffer[cursor + 1 : end]))
            position = end
        self._buffer = buffer[position:]
        return packets


class Publisher(asyncio.Protocol):
    """Publishes prepared payloads at QoS 1 with at most `pace.window` unanswered.

    `on_ack(index)` is called for each positive acknowledgement; refusals are in `refused` by reason code.
    """

    def __init__(
        self, client_id: str, topic: str, payloads: Sequence[bytes], pace: Pace, on_ack: Callable[[int], None]
    ) -> None:
        self._connect = connect_packet(client_id)
        head = _text(topic)
        self._packets = [
            _packet(0x32, head + struct.pack(">H", index % 65535 + 1) + b"\0" + payload)
            for index, payload in enumerate(payloads)
        ]
        self.pace = pace
        self._on_ack = on_ack
        self._splitter = Splitter()
        self._sent_at: list[float] = []
        self._transport: asyncio.Transport | None = None
        self._answered = 0
        self.latencies = Latencies()
        self.refused: dict[int, int] = {}
        self.out_of_order = 0
        loop = asyncio.get_running_loop()
        self.connected: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()

    @property
    def sent(self) -> int:
        """Messages written."""
        return len(self._sent_at)

    @property
    def answered(self) -> int:
        """Messages acknowledged, well or ill."""
        return self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self._transport = transport
        transport.write(self._connect)

    def data_received(self, data: bytes) -> None:
        """CONNACK, then PUBACKs."""
        for first, body in self._splitter.feed(data):
            if first == 0x20:
                if body[1]:
                    self._fail(ConnectionRefusedError(f"CONNACK 0x{body[1]:02x}"))
                elif not self.connected.done():
                    self.connected.set_result(None)
            elif first == 0x40:
                self._acknowledged(body)
            elif first == 0xE0:
                self._fail(ConnectionAbortedError(f"DISCONNECT 0x{body[0] if body else 0:02x}"))
        if self.connected.done():
            self.push()

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed the socket."""
        if self._answered < len(self._packets):
            self._fail(exc or ConnectionResetError("connection closed"))

    def push(self) -> None:
        """Write what the pace allows."""
        assert self._transport is not None
        sent = len(self._sent_at)
        room = min(self.pace.room(sent, self._answered), len(self._packets) - sent, CHUNK)
        if room > 0 and not self._transport.is_closing():
            self._transport.write(b"".join(self._packets[sent : sent + room]))
            self._sent_at.extend([time.perf_counter()] * room)

    def close(self) -> None:
        """Send DISCONNECT and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"\xe0\x00")
            self._transport.close()

    def _acknowledged(self, body: bytes) -> None:
        index = self._answered
        if struct.unpack_from(">H", body)[0] != index % 65535 + 1:
            self.out_of_order += 1
        reason = body[2] if len(body) > 2 else 0
        self._answered += 1
        self.latencies.record(time.perf_counter() - self._sent_at[index])
        if reason in (0x00, 0x10):
            self._on_ack(index)
        else:
            self.refused[reason] = self.refused.get(reason, 0) + 1
        if self._answered == len(self._packets) and not self.finished.done():
            self.finished.set_result(None)

    def _fail(self, error: Exception) -> None:
        for future in (self.connected, self.finished):
            if not future.done():
                future.set_exception(error)


class Subscriber(asyncio.Protocol):
    """Subscribes to one filter and hands every payload to `on_message`; QoS 1 is acknowledged at once."""

    def __init__(self, client_id: str, topic_filter: str, qos: int, on_message: Callable[[bytes], None]) -> None:
        self._connect = connect_packet(client_id)
        self._subscribe = _packet(0x82, b"\0\1\0" + _text(topic_filter) + bytes((qos,)))
        self._on_message = on_message
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.subscribed: asyncio.Future[int] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self._transport = transport
        transport.write(self._connect)

    def data_received(self, data: bytes) -> None:
        """CONNACK, SUBACK, PUBLISH."""
        assert self._transport is not None
        acks = bytearray()
        for first, body in self._splitter.feed(data):
            if first >> 4 == 3:
                topic_end = 2 + struct.unpack_from(">H", body)[0]
                position = topic_end
                if first & 0x06:
                    acks += b"\x40\x02" + body[position : position + 2]
                    position += 2
                length, shift = 0, 0
                while body[position] & 0x80:
                    length |= (body[position] & 0x7F) << shift
                    shift += 7
                    position += 1
                length |= body[position] << shift
                self._on_message(body[position + 1 + length :])
            elif first == 0x20:
                self._transport.write(self._subscribe)
            elif first == 0x90 and not self.subscribed.done():
                self.subscribed.set_result(body[-1])
            elif first == 0xE0 and not self.lost.done():
                self.lost.set_result(f"DISCONNECT 0x{body[0] if body else 0:02x}")
        if acks:
            self._transport.write(bytes(acks))

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed the socket."""
        if not self.lost.done():
            self.lost.set_result(str(exc or "connection closed"))

    def close(self) -> None:
        """Send DISCONNECT and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"\xe0\x00")
            self._transport.close()
