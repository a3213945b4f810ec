"""Decodes packets, of all versions and both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocols.errors import PeerError
from protocols.mqtt import packets, topics
from protocols.mqtt.codec import UNLIMITED, Reader, decode_name
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import WILL, Properties, decode_properties
from protocols.mqtt.reasons import REASON_CODES, PacketType, ReasonCode, ReturnCode, malformed, protocol_error

FLAGS: Final[dict[int, int]] = {
    PacketType.PUBREL: 0b0010,
    PacketType.SUBSCRIBE: 0b0010,
    PacketType.UNSUBSCRIBE: 0b0010,
}
"""The reserved flags that are not 0 (table 2-2); PUBLISH's flags are not reserved."""

WRONG_FLAGS: Final[dict[int, ReasonCode]] = {PacketType.PUBREL: ReasonCode.PROTOCOL_ERROR}
"""Reason codes for wrong flags other than 0x81; [MQTT-3.6.1-1] fixes no code, so it is the same as Mosquitto's."""

BRIDGE: Final = 0x80
"""The top bit of the protocol level: Mosquitto's mark for a bridge (its `try_private`, on by default)."""

_V31: Final = {Version.V31: Version.V31, BRIDGE | Version.V31: Version.V31}
_LATER: Final = {level: Version(level & ~BRIDGE) for level in (Version.V311, Version.V5, BRIDGE | Version.V311)}
_LEVELS: Final[dict[bytes, dict[int, Version]]] = {b"MQIsdp": _V31, b"MQTT": _LATER}
"""The levels that are served, by protocol name."""


def check_flags(first: int, version: Version) -> None:
    """Check the flags in the first byte [MQTT-2.1.3-1]; raise PeerError if they differ from table 2-2."""
    kind = first >> 4
    if kind == PacketType.PUBLISH or first & 0x0F == FLAGS.get(kind, 0):
        return
    if version is Version.V31 and kind in FLAGS and first & 0x0F & ~0b1000 == FLAGS[kind]:
        return  # MQTT 3.1 has DUP on these
    raise PeerError(WRONG_FLAGS.get(kind, ReasonCode.MALFORMED_PACKET), f"wrong flags on {PacketType(kind).name}")


def decode_packet(first: int, body: bytes, version: Version, most: int = UNLIMITED) -> Packet:
    """Decode one packet from its first byte and its body, the bytes counted by the remaining length.

    `version` is ignored for CONNECT, which contains it. `most` user properties are decoded, and of a PUBLISH with more
    one more; its receiver refuses it.

    Raises:
        PeerError: the packet is malformed or not allowed by the protocol.
    """
    if first >> 4 == PacketType.PUBLISH:
        return decode_publish(first, body, version, most)
    decode = _DECODERS.get(first >> 4)
    if decode is None or (version is not Version.V5 and first >> 4 == PacketType.AUTH):
        raise protocol_error(f"packet type {first >> 4} does not exist")
    check_flags(first, version)
    reader = Reader(body)
    reader.most_pairs = most
    packet = decode(reader, version)
    reader.finish()
    return packet


def decode_version(reader: Reader) -> tuple[Version, bool]:
    """Read protocol name and level of a CONNECT (sections 3.1.2.1 and 3.1.2.2).

    Returns:
        The version, and whether the level has a bridge's mark. Only the versions that cannot say No Local have it.

    Raises:
        PeerError: 0x84 for an unsupported level, malformed for another protocol.
    """
    name = reader.binary()
    if name not in _LEVELS:
        raise malformed("not MQTT")  # [MQTT-3.1.2-1]
    level = reader.integer(1)
    served = _LEVELS[name].get(level)
    if served is None:
        raise PeerError(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, f"protocol level {level}")  # [MQTT-3.1.2-2]
    return served, bool(level & BRIDGE)


def decode_connect_rest(reader: Reader, version: Version, bridge: bool = False) -> packets.Connect:
    """Read a CONNECT behind the protocol level."""
    flags = reader.integer(1)
    if flags & 0x01 and version is not Version.V31:
        raise malformed("the reserved connect flag is set")  # [MQTT-3.1.2-3]
    clean_start, has_will, will_qos, will_retain = flags & 0x02, flags & 0x04, flags >> 3 & 3, flags & 0x20
    has_password, has_username = flags & 0x40, flags & 0x80
    if will_qos == 3 or (not has_will and (will_qos or will_retain)):
        raise malformed("will flags that contradict each other")  # [MQTT-3.1.2-11], [MQTT-3.1.2-12], [MQTT-3.1.2-13]
    if has_password and not has_username and version is not Version.V5:
        raise malformed("a password without a user name")  # [MQTT311-3.1.2-22]
    keep_alive = reader.integer(2)
    properties = _properties(reader, version, PacketType.CONNECT)
    client_id = _client_id(reader.binary(), version)
    if not client_id and (version is Version.V31 or (version is Version.V311 and not clean_start)):
        raise PeerError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "an empty client identifier")  # [MQTT311-3.1.3-8]
    will = None
    if has_will:
        will_properties = _properties(reader, version, WILL)
        topic = reader.name()
        if not topics.is_valid_name(topic):
            raise malformed("the will's topic is not a topic name")
        _check_response_topic(will_properties)
        will = packets.Will(topic, reader.binary(), will_qos, bool(will_retain), will_properties)
    username = reader.name() if has_username else None
    password = reader.binary() if has_password else None
    if (
        properties is not None
        and properties.authentication_data is not None
        and properties.authentication_method is None
    ):
        raise protocol_error("authentication data without a method")
    return packets.Connect(
        version, client_id, bool(clean_start), keep_alive, username, password, will, properties, bridge
    )


def decode_publish(first: int, body: bytes, version: Version, most: int = UNLIMITED) -> packets.Publish:
    """Read a PUBLISH (section 3.3); the topic is empty if the packet has only an alias."""
    qos = first >> 1 & 3
    if qos == 3:
        raise malformed("QoS 3")  # [MQTT-3.3.1-4]
    if not qos and first & 0x08:
        raise malformed("DUP at QoS 0")  # [MQTT-3.3.1-2]
    reader = Reader(body)
    reader.most_pairs = most
    name = reader.binary()
    packet_id = _packet_id(reader) if qos else 0
    topic = decode_name(name)
    if topic and not topics.is_valid_name(topic):
        raise malformed("the topic contains a wildcard")  # [MQTT-3.3.2-2]
    properties = _properties(reader, version, PacketType.PUBLISH)
    if not topic and (properties is None or properties.topic_alias is None):
        if version is Version.V5:
            raise protocol_error("neither topic nor topic alias")  # section 3.3.2.1
        raise malformed("an empty topic")  # [MQTT-4.7.3-1]
    _check_response_topic(properties)
    payload = reader.take(reader.left)
    return packets.Publish(topic, payload, qos, bool(first & 1), bool(first & 8), packet_id, properties)


def _connack(reader: Reader, version: Version) -> packets.Connack:
    flags = reader.integer(1)
    if flags > 1:
        raise malformed("reserved flags on CONNACK")  # [MQTT-3.2.2-1]
    code = reader.integer(1)
    if version is not Version.V5:
        if code > max(ReturnCode):
            raise protocol_error(f"unknown return code {code}")
        return packets.Connack(bool(flags), code)
    _check_reason(code, PacketType.CONNACK)
    return packets.Connack(bool(flags), code, _properties(reader, version, PacketType.CONNACK))


def _acknowledgement(
    kind: PacketType, make: Callable[[int, int, Properties | None], Packet]
) -> Callable[[Reader, Version], Packet]:
    def decode(reader: Reader, version: Version) -> Packet:
        return make(_packet_id(reader), *_code_and_properties(reader, version, kind))

    return decode


def _subscribe(reader: Reader, version: Version) -> packets.Subscribe:
    packet_id = _request_id(reader)
    properties = _properties(reader, version, PacketType.SUBSCRIBE)
    subscriptions = []
    while reader.left:
        topic_filter = _filter(reader, version)
        options = reader.integer(1)
        if options & (0b1100_0000 if version is Version.V5 else 0b1111_1100):
            raise malformed("reserved subscription options are set")  # [MQTT-3.8.3-5]
        if options & 3 == 3 or options & 0x30 == 0x30:
            raise protocol_error("QoS 3 or Retain Handling 3 in subscription options")  # section 3.8.3.1
        no_local = bool(options & 4)
        if no_local and topics.is_shared(topic_filter):
            raise protocol_error("No Local on a shared subscription")  # [MQTT-3.8.3-4]
        subscriptions.append(
            packets.Subscription(topic_filter, options & 3, no_local, bool(options & 8), options >> 4 & 3)
        )
    if not subscriptions:
        raise protocol_error("SUBSCRIBE without a topic filter")  # [MQTT-3.8.3-2]
    return packets.Subscribe(packet_id, tuple(subscriptions), properties)


def _answer(
    kind: PacketType, make: Callable[[int, tuple[int, ...], Properties | None], Packet]
) -> Callable[[Reader, Version], Packet]:
    """Return the decoder of SUBACK or UNSUBACK."""

    def decode(reader: Reader, version: Version) -> Packet:
        packet_id = _packet_id(reader)
        if kind is PacketType.UNSUBACK and version is not Version.V5:
            return make(packet_id, (), None)
        properties = _properties(reader, version, kind)
        codes = tuple(reader.take(reader.left))
        for code in codes:
            if version is Version.V5:
                _check_reason(code, kind)
            elif code not in (0, 1, 2, 0x80):
                raise protocol_error(f"return code 0x{code:02X} on SUBACK")  # [MQTT311-3.9.3-2]
        if not codes:
            raise malformed(f"{kind.name} without a code")
        return make(packet_id, codes, properties)

    return decode


def _unsubscribe(reader: Reader, version: Version) -> packets.Unsubscribe:
    packet_id = _request_id(reader)
    properties = _properties(reader, version, PacketType.UNSUBSCRIBE)
    filters = []
    while reader.left:
        filters.append(_filter(reader, version))
    if not filters:
        raise protocol_error("UNSUBSCRIBE without a topic filter")  # [MQTT-3.10.3-2]
    return packets.Unsubscribe(packet_id, tuple(filters), properties)


_DECODERS: Final[dict[int, Callable[[Reader, Version], Packet]]] = {
    PacketType.CONNECT: lambda reader, _version: decode_connect_rest(reader, *decode_version(reader)),
    PacketType.CONNACK: _connack,
    PacketType.PUBACK: _acknowledgement(PacketType.PUBACK, packets.Puback),
    PacketType.PUBREC: _acknowledgement(PacketType.PUBREC, packets.Pubrec),
    PacketType.PUBREL: _acknowledgement(PacketType.PUBREL, packets.Pubrel),
    PacketType.PUBCOMP: _acknowledgement(PacketType.PUBCOMP, packets.Pubcomp),
    PacketType.SUBSCRIBE: _subscribe,
    PacketType.SUBACK: _answer(PacketType.SUBACK, packets.Suback),
    PacketType.UNSUBSCRIBE: _unsubscribe,
    PacketType.UNSUBACK: _answer(PacketType.UNSUBACK, packets.Unsuback),
    PacketType.PINGREQ: lambda _reader, _version: packets.Pingreq(),
    PacketType.PINGRESP: lambda _reader, _version: packets.Pingresp(),
    PacketType.DISCONNECT: lambda reader, version: packets.Disconnect(
        *_code_and_properties(reader, version, PacketType.DISCONNECT)
    ),
    PacketType.AUTH: lambda reader, version: packets.Auth(*_code_and_properties(reader, version, PacketType.AUTH)),
}


def _code_and_properties(reader: Reader, version: Version, kind: PacketType) -> tuple[int, Properties | None]:
    """Read reason code and properties, each of which may be omitted (section 3.4.2.1)."""
    if version is not Version.V5 or not reader.left:
        return 0, None
    code = reader.integer(1)
    _check_reason(code, kind)
    return code, _properties(reader, version, kind) if reader.left else None


def _properties(reader: Reader, version: Version, packet: int) -> Properties | None:
    return decode_properties(reader, packet) if version is Version.V5 else None


def _check_reason(code: int, kind: PacketType) -> None:
    if code not in REASON_CODES[kind]:
        raise protocol_error(f"reason code 0x{code:02X} on {kind.name}")


def _packet_id(reader: Reader) -> int:
    packet_id = reader.integer(2)
    if not packet_id:
        raise protocol_error("packet identifier 0")  # [MQTT-2.2.1-3]
    return packet_id


def _request_id(reader: Reader) -> int:
    packet_id = reader.integer(2)
    if not packet_id:
        raise malformed("packet identifier 0")  # [MQTT-2.2.1-3]; same code as Mosquitto
    return packet_id


def _filter(reader: Reader, version: Version) -> str:
    topic_filter = reader.name()
    if not topics.is_valid_filter(topic_filter, shared=version is Version.V5):
        raise malformed("not a topic filter")  # [MQTT-4.7.1-1], [MQTT-4.7.3-1]
    return topic_filter


def _client_id(data: bytes, version: Version) -> str:
    try:
        return decode_name(data)
    except PeerError as fault:
        if version is Version.V5:
            raise PeerError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, fault.reason) from None
        raise


def _check_response_topic(properties: Properties | None) -> None:
    topic = None if properties is None else properties.response_topic
    if topic is not None and not topics.is_valid_name(topic):
        raise protocol_error("the response topic is not a topic name")  # [MQTT-3.3.2-14]
