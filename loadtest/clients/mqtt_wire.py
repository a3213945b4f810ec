"""MQTT packets, implemented independently of the gateway, for the clients of this package."""

from __future__ import annotations

import struct
from typing import Final

SESSION_EXPIRY: Final = 0x11
AUTHENTICATION_METHOD: Final = 0x15
AUTHENTICATION_DATA: Final = 0x16
RECEIVE_MAXIMUM: Final = 0x21


def varint(value: int) -> bytes:
    """Encode a Variable Byte Integer (1.5.5)."""
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | (128 if value else 0))
        if not value:
            return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the Variable Byte Integer at `at`; return it and its end."""
    value, shift = 0, 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


def text(value: str) -> bytes:
    """Encode a UTF-8 Encoded String (1.5.4)."""
    raw = value.encode()
    return struct.pack(">H", len(raw)) + raw


def packet(first: int, body: bytes) -> bytes:
    """Return a control packet: first byte, length, body."""
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
    authentication: tuple[str, bytes] | None = None,
    will: tuple[str, bytes] | None = None,
) -> bytes:
    """Return an MQTT 5 CONNECT.

    `authentication` has the method and the data of enhanced authentication (4.12), `will` topic and payload (3.1.3.2).
    """
    flags = (0x80 if user is not None else 0) | (0x40 if password is not None else 0) | (0x02 if clean_start else 0)
    flags |= 0x04 if will is not None else 0
    properties = b""
    if session_expiry_s:
        properties += struct.pack(">BI", SESSION_EXPIRY, session_expiry_s)
    if receive_maximum is not None:
        properties += struct.pack(">BH", RECEIVE_MAXIMUM, receive_maximum)
    if authentication is not None:
        properties += authentication_properties(*authentication)
    body = text("MQTT") + bytes((5, flags)) + struct.pack(">H", keep_alive_s)
    body += varint(len(properties)) + properties + text(client_id)
    if will is not None:
        topic, payload = will
        body += b"\0" + text(topic) + struct.pack(">H", len(payload)) + payload
    for part in (user, password):
        if part is not None:
            body += text(part)
    return packet(0x10, body)


def authentication_properties(method: str, data: bytes) -> bytes:
    """Return the properties of enhanced authentication, without their length."""
    return bytes((AUTHENTICATION_METHOD,)) + text(method) + struct.pack(">BH", AUTHENTICATION_DATA, len(data)) + data


def auth_packet(method: str, data: bytes) -> bytes:
    """Return an AUTH packet that continues an authentication (3.15)."""
    properties = authentication_properties(method, data)
    return packet(0xF0, b"\x18" + varint(len(properties)) + properties)


def publish_packet(
    topic: str, payload: bytes, qos: int, packet_id: int = 0, *, dup: bool = False, properties: bytes = b""
) -> bytes:
    """Return an MQTT 5 PUBLISH; `properties` without their length."""
    identifier = struct.pack(">H", packet_id) if qos else b""
    body = text(topic) + identifier + varint(len(properties)) + properties + payload
    return packet(0x30 | qos << 1 | dup << 3, body)


def subscribe_packet(packet_id: int, filters: list[tuple[str, int]]) -> bytes:
    """Return an MQTT 5 SUBSCRIBE of filters with their QoS."""
    body = struct.pack(">HB", packet_id, 0)
    return packet(0x82, body + b"".join(text(topic_filter) + bytes((qos,)) for topic_filter, qos in filters))


class Splitter:
    """Splits a byte stream into packets as (first byte, body) pairs."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def is_empty(self) -> bool:
        """Whether no incomplete packet is buffered."""
        return not self._buffer

    def take(self) -> bytes:
        """Return and clear the buffered incomplete packet."""
        rest, self._buffer = self._buffer, b""
        return rest

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the packets that are now complete."""
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
