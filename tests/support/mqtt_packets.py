"""Encodes the packets of both directions: the gateway encodes only those that a server sends."""

from __future__ import annotations

from protocols.mqtt import encoding, packets
from protocols.mqtt.codec import encode_binary, encode_text, encode_varint
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import WILL, Properties, encode_properties
from protocols.mqtt.reasons import PacketType


def encode_packet(packet: Packet, version: Version) -> bytes:
    """Encode one packet of any version."""
    match packet:
        case packets.Connect():
            first, body = 0x10, _connect(packet)
        case packets.Publish():
            first = 0x30 | packet.dup << 3 | packet.qos << 1 | packet.retain
            packet_id = packet.packet_id.to_bytes(2) if packet.qos else b""
            properties = _properties(packet.properties, version, PacketType.PUBLISH)
            body = encode_text(packet.topic) + packet_id + properties + packet.payload
        case packets.Subscribe():
            first, body = 0x82, packet.packet_id.to_bytes(2)
            body += _properties(packet.properties, version, PacketType.SUBSCRIBE)
            for one in packet.subscriptions:
                options = one.qos | one.no_local << 2 | one.retain_as_published << 3 | one.retain_handling << 4
                body += encode_text(one.topic_filter) + bytes((options,))
        case packets.Unsubscribe():
            first, body = 0xA2, packet.packet_id.to_bytes(2)
            body += _properties(packet.properties, version, PacketType.UNSUBSCRIBE)
            body += b"".join(map(encode_text, packet.topic_filters))
        case packets.Pingreq():
            first, body = 0xC0, b""
        case packets.Pingresp():
            first, body = 0xD0, b""
        case _:
            return encoding.encode_packet(packet, version)
    return bytes((first,)) + encode_varint(len(body)) + body


def _connect(packet: packets.Connect) -> bytes:
    version, will = packet.version, packet.will
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


def _properties(properties: Properties | None, version: Version, packet: int) -> bytes:
    return encode_properties(properties, packet) if version is Version.V5 else b""
