"""Encodes packets, of all versions and both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.codec import encode_binary, encode_text, encode_varint
from protocols.mqtt.decoding import FLAGS
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import WILL, Properties, encode_properties
from protocols.mqtt.reasons import REASON_CODES, PacketType

MAX_ID: Final = 0xFFFF


class PreparedPublish(msgspec.Struct, frozen=True, gc=False):
    """The encoded parts of a PUBLISH that all receivers of one version share."""

    topic: bytes  # with length prefix
    rest: bytes  # properties (MQTT 5.0) and payload


def prepare_publish(topic: str, payload: bytes, properties: Properties | None, version: Version) -> PreparedPublish:
    """Encode a PUBLISH once for sending it to many receivers.

    Raises:
        UsageError: a field cannot be sent, or there is a topic alias, which only a connection can set.
    """
    if properties is not None and properties.topic_alias is not None:
        raise UsageError("topic aliases are set by the sending connection")
    if version is Version.V5:
        payload = encode_properties(properties, PacketType.PUBLISH) + payload if properties else b"\0" + payload
    return PreparedPublish(encode_text(topic), payload)


def encode_prepared(message: PreparedPublish, *, retain: bool) -> bytes:
    """Return the complete packet at QoS 0."""
    body = message.topic + message.rest
    return bytes((0x30 | retain,)) + encode_varint(len(body)) + body


def encode_packet(packet: Packet, version: Version) -> bytes:
    """Encode one packet; raise UsageError for a field, reason code or property that is not allowed in it."""
    kind, first, encode = _ENCODERS[type(packet)]
    if kind == PacketType.PUBLISH:
        first |= packet.dup << 3 | packet.qos << 1 | packet.retain  # type: ignore[union-attr]
    body = encode(packet, version)
    return bytes((first,)) + encode_varint(len(body)) + body


def _connect(packet: packets.Connect, _version: Version) -> bytes:
    version = packet.version
    will = packet.will
    flags = packet.clean_start << 1 | (packet.username is not None) << 7 | (packet.password is not None) << 6
    if will is not None:
        flags |= 0x04 | will.qos << 3 | will.retain << 5
    body = encode_text("MQIsdp" if version is Version.V31 else "MQTT")
    body += bytes((version, flags)) + packet.keep_alive.to_bytes(2)
    body += _properties(packet.properties, version, PacketType.CONNECT) + encode_text(packet.client_id)
    if will is not None:
        body += _properties(will.properties, version, WILL) + encode_text(will.topic) + encode_binary(will.payload)
    if packet.username is not None:
        body += encode_text(packet.username)
    if packet.password is not None:
        body += encode_binary(packet.password)
    return body


def _connack(packet: packets.Connack, version: Version) -> bytes:
    if version is Version.V5:
        _check_reason(packet.reason_code, PacketType.CONNACK)
    body = bytes((packet.session_present, packet.reason_code))
    return body + _properties(packet.properties, version, PacketType.CONNACK)


def _publish(packet: packets.Publish, version: Version) -> bytes:
    packet_id = _packet_id(packet.packet_id) if packet.qos else b""
    properties = _properties(packet.properties, version, PacketType.PUBLISH)
    return encode_text(packet.topic) + packet_id + properties + packet.payload


def _acknowledgement(kind: PacketType) -> Callable[[Any, Version], bytes]:
    def encode(packet: packets.Acknowledgement, version: Version) -> bytes:
        return _packet_id(packet.packet_id) + _short(packet.reason_code, packet.properties, version, kind)

    return encode


def _subscribe(packet: packets.Subscribe, version: Version) -> bytes:
    body = _packet_id(packet.packet_id) + _properties(packet.properties, version, PacketType.SUBSCRIBE)
    for one in packet.subscriptions:
        options = one.qos | one.no_local << 2 | one.retain_as_published << 3 | one.retain_handling << 4
        body += encode_text(one.topic_filter) + bytes((options,))
    return body


def _suback(packet: packets.Suback, version: Version) -> bytes:
    codes = packet.reason_codes
    for code in codes:
        _check_reason(code, PacketType.SUBACK)
    if version is not Version.V5:
        codes = tuple(min(128, code) for code in codes)  # 3.1.1's only failure code
    return _packet_id(packet.packet_id) + _properties(packet.properties, version, PacketType.SUBACK) + bytes(codes)


def _unsubscribe(packet: packets.Unsubscribe, version: Version) -> bytes:
    body = _packet_id(packet.packet_id) + _properties(packet.properties, version, PacketType.UNSUBSCRIBE)
    return body + b"".join(encode_text(one) for one in packet.topic_filters)


def _unsuback(packet: packets.Unsuback, version: Version) -> bytes:
    body = _packet_id(packet.packet_id)
    if version is not Version.V5:
        return body
    for code in packet.reason_codes:
        _check_reason(code, PacketType.UNSUBACK)
    return body + _properties(packet.properties, version, PacketType.UNSUBACK) + bytes(packet.reason_codes)


def _empty(_packet: Packet, _version: Version) -> bytes:
    return b""


def _disconnect(packet: packets.Disconnect, version: Version) -> bytes:
    return _short(packet.reason_code, packet.properties, version, PacketType.DISCONNECT)


def _auth(packet: packets.Auth, version: Version) -> bytes:
    if version is not Version.V5:
        raise UsageError("AUTH does not exist before MQTT 5.0")
    return _short(packet.reason_code, packet.properties, version, PacketType.AUTH)


def _row(
    kind: PacketType, encode: Callable[[Any, Version], bytes]
) -> tuple[PacketType, int, Callable[[Any, Version], bytes]]:
    return kind, kind << 4 | FLAGS.get(kind, 0), encode


_ENCODERS: Final[dict[type, tuple[PacketType, int, Callable[[Any, Version], bytes]]]] = {
    packets.Connect: _row(PacketType.CONNECT, _connect),
    packets.Connack: _row(PacketType.CONNACK, _connack),
    packets.Publish: _row(PacketType.PUBLISH, _publish),
    packets.Puback: _row(PacketType.PUBACK, _acknowledgement(PacketType.PUBACK)),
    packets.Pubrec: _row(PacketType.PUBREC, _acknowledgement(PacketType.PUBREC)),
    packets.Pubrel: _row(PacketType.PUBREL, _acknowledgement(PacketType.PUBREL)),
    packets.Pubcomp: _row(PacketType.PUBCOMP, _acknowledgement(PacketType.PUBCOMP)),
    packets.Subscribe: _row(PacketType.SUBSCRIBE, _subscribe),
    packets.Suback: _row(PacketType.SUBACK, _suback),
    packets.Unsubscribe: _row(PacketType.UNSUBSCRIBE, _unsubscribe),
    packets.Unsuback: _row(PacketType.UNSUBACK, _unsuback),
    packets.Pingreq: _row(PacketType.PINGREQ, _empty),
    packets.Pingresp: _row(PacketType.PINGRESP, _empty),
    packets.Disconnect: _row(PacketType.DISCONNECT, _disconnect),
    packets.Auth: _row(PacketType.AUTH, _auth),
}


def _short(code: int, properties: Properties | None, version: Version, kind: PacketType) -> bytes:
    """Encode reason code and properties, each omitted where the standard allows it (section 3.4.2.1)."""
    if version is not Version.V5:
        return b""
    _check_reason(code, kind)
    encoded = encode_properties(properties, kind)
    if encoded == b"\0":
        return bytes((code,)) if code else b""
    return bytes((code,)) + encoded


def _properties(properties: Properties | None, version: Version, packet: int) -> bytes:
    return encode_properties(properties, packet) if version is Version.V5 else b""


def _check_reason(code: int, kind: PacketType) -> None:
    if code not in REASON_CODES[kind]:
        raise UsageError(f"reason code 0x{code:02X} is not one of {kind.name}")


def _packet_id(packet_id: int) -> bytes:
    if not 1 <= packet_id <= MAX_ID:
        raise UsageError(f"a packet identifier is 1..{MAX_ID}, got {packet_id}")
    return packet_id.to_bytes(2)
