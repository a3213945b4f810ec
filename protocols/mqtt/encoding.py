"""Encodes the packets that a server sends, of all versions."""

from __future__ import annotations

from typing import Final

import msgspec

from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.codec import encode_text, encode_varint
from protocols.mqtt.decoding import FLAGS
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties, encode_properties
from protocols.mqtt.reasons import REASON_CODES, PacketType

MAX_ID: Final = 0xFFFF
ServerPacket = (
    packets.Connack | packets.Acknowledgement | packets.Suback | packets.Unsuback | packets.Disconnect | packets.Auth
)
"""A packet that a server sends, except PUBLISH (`prepare_publish`) and PINGRESP."""

_KINDS: Final[dict[type, PacketType]] = {
    packets.Connack: PacketType.CONNACK,
    packets.Puback: PacketType.PUBACK,
    packets.Pubrec: PacketType.PUBREC,
    packets.Pubrel: PacketType.PUBREL,
    packets.Pubcomp: PacketType.PUBCOMP,
    packets.Suback: PacketType.SUBACK,
    packets.Unsuback: PacketType.UNSUBACK,
    packets.Disconnect: PacketType.DISCONNECT,
    packets.Auth: PacketType.AUTH,
}


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


def encode_packet(packet: ServerPacket, version: Version) -> bytes:
    """Encode one packet.

    Raises:
        UsageError: a field, reason code or property is not allowed in it.
    """
    kind, v5 = _KINDS[type(packet)], version is Version.V5
    codes = packet.reason_codes if isinstance(packet, packets.Suback | packets.Unsuback) else (packet.reason_code,)
    for code in codes:
        if code not in REASON_CODES[kind] and (v5 or kind is PacketType.SUBACK):
            raise UsageError(f"reason code 0x{code:02X} is not one of {kind.name}")
    properties = encode_properties(packet.properties, kind) if v5 else b""
    match packet:
        case packets.Connack():
            body = bytes((packet.session_present, *codes)) + properties
        case packets.Suback():
            allowed = codes if v5 else [min(128, code) for code in codes]  # 3.1.1 has only one failure code
            body = _packet_id(packet.packet_id) + properties + bytes(allowed)
        case packets.Unsuback():
            body = _packet_id(packet.packet_id) + (properties + bytes(codes) if v5 else b"")
        case _:
            body = _packet_id(packet.packet_id) if isinstance(packet, packets.Acknowledgement) else b""
            if v5 and properties != b"\0":
                body += bytes(codes) + properties
            elif v5 and any(codes):  # both may be omitted (section 3.4.2.1)
                body += bytes(codes)
    return bytes((kind << 4 | FLAGS.get(kind, 0),)) + encode_varint(len(body)) + body


def _packet_id(packet_id: int) -> bytes:
    if not 1 <= packet_id <= MAX_ID:
        raise UsageError(f"a packet identifier is 1..{MAX_ID}, got {packet_id}")
    return packet_id.to_bytes(2)
