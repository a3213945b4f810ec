"""MQTT packets written down once more, from the standard: what the clients of this package send and take apart."""

from __future__ import annotations

import struct
from typing import Final

SESSION_EXPIRY: Final = 0x11
RECEIVE_MAXIMUM: Final = 0x21


def varint(value: int) -> bytes:
    """A Variable Byte Integer (1.5.5)."""
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | (128 if value else 0))
        if not value:
            return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The Variable Byte Integer at `at`, and where it ends."""
    value, shift = 0, 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


def text(value: str) -> bytes:
    """A UTF-8 Encoded String (1.5.4)."""
    raw = value.encode()
    return struct.pack(">H", len(raw)) + raw


def packet(first: int, body: bytes) -> bytes:
    """A control packet: its first byte, its length, its body."""
    return bytes((first,)) + varint(len(body)) + body


def connect_packet(
    client_id: str,
    user: str | None = None,
    password: str | None = None,
    *,
    clean_start: bool = True,
    session_expiry_s: int = 0,
    receive_maximum: int | None = None,
    keep_alive_s: int = 60,
) -> bytes:
    """CONNECT, MQTT 5."""
    flags = (0x80 if user is not None else 0) | (0x40 if password is not None else 0) | (0x02 if clean_start else 0)
    properties = b""
    if session_expiry_s:
        properties += struct.pack(">BI", SESSION_EXPIRY, session_expiry_s)
    if receive_maximum is not None:
        properties += struct.pack(">BH", RECEIVE_MAXIMUM, receive_maximum)
    body = text("MQTT") + bytes((5, flags)) + struct.pack(">H", keep_alive_s)
    body += varint(len(properties)) + properties + text(client_id)
    for part in (user, password):
        if part is not None:
            body += text(part)
    return packet(0x10, body)


def publish_packet(topic: str, payload: bytes, qos: int, packet_id: int = 0, *, dup: bool = False) -> bytes:
    """PUBLISH, MQTT 5, without properties."""
    identifier = struct.pack(">H", packet_id) if qos else b""
    return packet(0x30 | qos << 1 | dup << 3, text(topic) + identifier + b"\0" + payload)


def subscribe_packet(packet_id: int, filters: list[tuple[str, int]]) -> bytes:
    """SUBSCRIBE, MQTT 5: filters with their QoS."""
    body = struct.pack(">HB", packet_id, 0)
    return packet(0x82, body + b"".join(text(topic_filter) + bytes((qos,)) for topic_filter, qos in filters))


class Splitter:
    """Cuts a byte stream into (first byte, body) pairs."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def is_empty(self) -> bool:
        """Whether no part of a packet waits for its rest."""
        return not self._buffer

    def take(self) -> bytes:
        """Take the part of a packet that waits for its rest."""
        rest, self._buffer = self._buffer, b""
        return rest

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
