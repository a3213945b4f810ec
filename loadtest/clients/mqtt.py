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
from loadtest.clients.sender import WindowedSender


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


class Publisher(WindowedSender):
    """Publishes prepared payloads at QoS 1; refusals are counted by reason code."""

    goodbye = b"\xe0\x00"

    def __init__(
        self, client_id: str, topic: str, payloads: Sequence[bytes], pace: Pace, on_ack: Callable[[int], None]
    ) -> None:
        head = _text(topic)
        packets = [
            _packet(0x32, head + struct.pack(">H", index % 65535 + 1) + b"\0" + payload)
            for index, payload in enumerate(payloads)
        ]
        super().__init__(packets, pace, on_ack)
        self.greeting = connect_packet(client_id)
        self.out_of_order = 0
        self._splitter = Splitter()

    def data_received(self, data: bytes) -> None:
        """CONNACK, then PUBACKs."""
        now = time.perf_counter()
        for first, body in self._splitter.feed(data):
            if first == 0x40:
                self._acknowledged(body, now)
            elif first == 0x20:
                if body[1]:
                    self._fail(ConnectionRefusedError(f"CONNACK 0x{body[1]:02x}"))
                else:
                    self._is_connected()
            elif first == 0xE0:
                self._fail(ConnectionAbortedError(f"DISCONNECT 0x{body[0] if body else 0:02x}"))
        if self.connected.done():
            self.push()

    def _acknowledged(self, body: bytes, now: float) -> None:
        index = self.answered
        if body[0] << 8 | body[1] != index % 65535 + 1:
            self.out_of_order += 1
        reason = body[2] if len(body) > 2 else 0
        self._timed(index, now)
        self._answer(index, None if reason in (0x00, 0x10) else reason)


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
