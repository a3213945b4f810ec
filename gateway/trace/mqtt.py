"""MQTT packets as trace lines, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.runtime.secret import BLANK
from gateway.runtime.texts import cut
from gateway.trace.shown import TEXT, Line, shown, shown_bytes, shown_method, shown_pairs
from protocols.errors import PeerError
from protocols.mqtt import packets
from protocols.mqtt.codec import read_varint
from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import PacketType

KEPT: Final = 4 * 1024  # bytes kept of a packet; the rest of a larger one is skipped
VERSIONS: Final = {Version.V5: "5.0", Version.V311: "3.1.1", Version.V31: "3.1"}

NAMING: Final = frozenset({PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE})

Packet = tuple[int, bytes, int]
"""The first byte, the body or its start, and the body's full length."""


class TracedPackets:
    """Splits one direction's bytes, which are cut anywhere, into packets."""

    __slots__ = ("_buffer", "_skip")

    def __init__(self, begun: bytes = b"") -> None:
        """`begun` is the start of an incomplete packet that was received earlier."""
        self._buffer = bytearray(begun)
        self._skip = 0

    def split(self, data: bytes) -> Iterator[Packet]:
        """Yield the packets that are complete, or of which the first `KEPT` bytes are."""
        buffer = self._buffer
        if self._skip:
            data, self._skip = data[self._skip :], max(0, self._skip - len(data))
        buffer += data
        at, size = 0, len(buffer)
        while at + 2 <= size:
            try:
                header = read_varint(bytes(buffer[at + 1 : at + 5]), 0, min(4, size - at - 1))
            except PeerError:
                at = size  # not MQTT: the connection will be closed for it
                break
            if header is None:
                break
            length, start, _ = header
            start += at + 1
            if start + min(length, KEPT) > size:
                break
            end = start + length
            yield buffer[at], bytes(buffer[start : min(end, start + KEPT)]), length
            self._skip = max(0, end - size)
            at = min(end, size)
        del buffer[:at]


class MqttDecoder:
    """The packets of one connection; a `gateway.trace.traces.Decoder`."""

    def __init__(self, version: Version | None, begun: bytes, payload: int) -> None:
        """`version` is None before CONNECT; `payload` is how many bytes of each message are shown."""
        self._version = version or Version.V5
        self._packets = (TracedPackets(begun), TracedPackets())
        self._payload = payload

    def units(self, data: bytes, *, sent: bool) -> Iterator[Packet]:
        """Yield the packets that are complete with these bytes."""
        return self._packets[sent].split(data)

    @staticmethod
    def concerns(packet: Packet, topic: bytes) -> bool:
        """Return whether a packet names the topic: a PUBLISH to it or below it, or a filter that may contain it.

        A PUBLISH with only a topic alias is not recognized.
        """
        first, body, _ = packet
        kind = first >> 4
        if kind == PacketType.PUBLISH:
            name = body[2 : 2 + int.from_bytes(body[:2])]
            return name == topic or name.startswith(topic + b"/")
        return kind in NAMING and topic in body

    def line(self, packet: Packet, *, sent: bool) -> Line:
        """Return the packet's trace line."""
        first, body, length = packet
        try:
            decoded = decode_packet(first, body, self._version)
        except PeerError as error:
            kind = PacketType(first >> 4).name if first >> 4 else "reserved"
            return {"packet": kind, "bytes": length, "note": "large" if len(body) < length else error.reason}
        if isinstance(decoded, packets.Connect):
            self._version = decoded.version
        return described(decoded, self._payload, length - len(body))


def described(packet: packets.Packet, payload: int, cut_off: int = 0) -> Line:
    """Return a packet's fields. `cut_off` is how many bytes of its payload are missing."""
    line: Line = {"packet": type(packet).__name__.upper()}
    for name, value in zip(packet.__struct_fields__, msgspec.structs.astuple(packet), strict=True):
        if value is None:
            continue
        if name == "payload":
            line["bytes"] = len(value) + cut_off
            if payload:
                line["payload"] = shown_bytes(value, payload)
        elif name in {"password", "username"}:
            line[name] = BLANK  # a user name may be a mistyped password, or a token
        elif name == "version":
            line[name] = VERSIONS[value]
        elif name == "properties":
            line.update(_properties(value))
        elif name == "will":
            line[name] = described(value, payload) | {"packet": "will"}
        elif name == "reason_code":
            line[name] = f"0x{value:02X}"
        elif name == "reason_codes":
            line[name] = shown([f"0x{code:02X}" for code in value])
        elif name == "subscriptions":
            line[name] = shown([f"{cut(entry.topic_filter, TEXT)} QoS {entry.qos}" for entry in value])
        else:
            line[name] = shown(value)
    return line


def _properties(properties: Properties) -> Line:
    line: Line = {}
    for name, value in msgspec.structs.asdict(properties).items():
        if value is None or value == ():
            continue
        if name == "authentication_data":
            line[name] = BLANK
        elif name == "authentication_method":
            line[name] = shown_method(value)
        elif name == "user_properties":
            line[name] = shown_pairs(value)
        else:
            line[name] = shown(value)
    return line
