"""The properties of MQTT 5.0 (section 2.2.2.2): one table that drives decoding and encoding."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from protocols.errors import PeerError, UsageError
from protocols.mqtt.codec import Reader, encode_binary, encode_text, encode_varint
from protocols.mqtt.reasons import PacketType, ReasonCode, malformed, protocol_error

WILL: Final = 16
"""Pseudo packet type for the will's properties, a separate set inside CONNECT (section 3.1.3.2)."""


class Kind(enum.IntEnum):
    """The data type of a property's value."""

    BYTE = 1
    TWO_BYTES = 2
    FOUR_BYTES = 4
    VARINT = 5
    TEXT = 6
    NAME = 7
    BINARY = 8
    PAIR = 9


class Properties(msgspec.Struct, frozen=True, gc=False):
    """The properties of any packet; None means absent, which differs from the default value.

    `TABLE` lists the packets that may carry each. User properties keep their order and duplicates [MQTT-3.1.3-10].
    Only a PUBLISH to a client may have several subscription identifiers.
    """

    payload_format_indicator: int | None = None
    message_expiry_interval: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    subscription_identifiers: tuple[int, ...] = ()
    session_expiry_interval: int | None = None
    assigned_client_identifier: str | None = None
    server_keep_alive: int | None = None
    authentication_method: str | None = None
    authentication_data: bytes | None = None
    request_problem_information: int | None = None
    will_delay_interval: int | None = None
    request_response_information: int | None = None
    response_information: str | None = None
    server_reference: str | None = None
    reason_string: str | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: int | None = None
    user_properties: tuple[tuple[str, str], ...] = ()
    maximum_packet_size: int | None = None
    wildcard_subscription_available: int | None = None
    subscription_identifier_available: int | None = None
    shared_subscription_available: int | None = None


NONE: Final = Properties()


class Property(NamedTuple):
    """One row: identifier, name, type, the packets that may carry it, and the allowed values."""

    identifier: int
    name: str
    kind: Kind
    packets: frozenset[int]
    lowest: int = 0
    highest: int = 0xFFFFFFFF
    fault: int = ReasonCode.PROTOCOL_ERROR  # reason code for a value outside lowest..highest


def _on(*packets: int) -> frozenset[int]:
    return frozenset(packets)


_P: Final = PacketType
_MESSAGE: Final = _on(_P.PUBLISH, WILL)
_OPENING: Final = _on(_P.CONNECT, _P.CONNACK)
_AUTHENTICATING: Final = _on(_P.CONNECT, _P.CONNACK, _P.AUTH)
_EXPLAINED: Final = _on(
    _P.CONNACK, _P.PUBACK, _P.PUBREC, _P.PUBREL, _P.PUBCOMP, _P.SUBACK, _P.UNSUBACK, _P.DISCONNECT, _P.AUTH
)
_CONNACK: Final = _on(_P.CONNACK)
_EVERYWHERE: Final = _EXPLAINED | _on(_P.CONNECT, _P.PUBLISH, WILL, _P.SUBSCRIBE, _P.UNSUBSCRIBE)

TABLE: Final[tuple[Property, ...]] = (
    Property(0x01, "payload_format_indicator", Kind.BYTE, _MESSAGE, 0, 1),
    Property(0x02, "message_expiry_interval", Kind.FOUR_BYTES, _MESSAGE),
    Property(0x03, "content_type", Kind.TEXT, _MESSAGE),
    Property(0x08, "response_topic", Kind.NAME, _MESSAGE),
    Property(0x09, "correlation_data", Kind.BINARY, _MESSAGE),
    Property(0x0B, "subscription_identifiers", Kind.VARINT, _on(_P.PUBLISH, _P.SUBSCRIBE), 1),
    Property(0x11, "session_expiry_interval", Kind.FOUR_BYTES, _on(_P.CONNECT, _P.CONNACK, _P.DISCONNECT)),
    Property(0x12, "assigned_client_identifier", Kind.NAME, _CONNACK),
    Property(0x13, "server_keep_alive", Kind.TWO_BYTES, _CONNACK),
    Property(0x15, "authentication_method", Kind.TEXT, _AUTHENTICATING),
    Property(0x16, "authentication_data", Kind.BINARY, _AUTHENTICATING),
    Property(0x17, "request_problem_information", Kind.BYTE, _on(_P.CONNECT), 0, 1),
    Property(0x18, "will_delay_interval", Kind.FOUR_BYTES, _on(WILL)),
    Property(0x19, "request_response_information", Kind.BYTE, _on(_P.CONNECT), 0, 1),
    Property(0x1A, "response_information", Kind.TEXT, _CONNACK),
    Property(0x1C, "server_reference", Kind.TEXT, _on(_P.CONNACK, _P.DISCONNECT)),
    Property(0x1F, "reason_string", Kind.TEXT, _EXPLAINED),
    Property(0x21, "receive_maximum", Kind.TWO_BYTES, _OPENING, 1),
    Property(0x22, "topic_alias_maximum", Kind.TWO_BYTES, _OPENING),
    Property(0x23, "topic_alias", Kind.TWO_BYTES, _on(_P.PUBLISH), 1, 0xFFFF, ReasonCode.TOPIC_ALIAS_INVALID),
    Property(0x24, "maximum_qos", Kind.BYTE, _CONNACK, 0, 1),
    Property(0x25, "retain_available", Kind.BYTE, _CONNACK, 0, 1),
    Property(0x26, "user_properties", Kind.PAIR, _EVERYWHERE),
    Property(0x27, "maximum_packet_size", Kind.FOUR_BYTES, _OPENING, 1),
    Property(0x28, "wildcard_subscription_available", Kind.BYTE, _CONNACK, 0, 1),
    Property(0x29, "subscription_identifier_available", Kind.BYTE, _CONNACK, 0, 1),
    Property(0x2A, "shared_subscription_available", Kind.BYTE, _CONNACK, 0, 1),
)
"""Table 2-4, with the value ranges of the sections that define each property."""

_BY_IDENTIFIER: Final = {row.identifier: row for row in TABLE}

_FIELDS: Final = tuple(
    (row.identifier, row.name, int(row.kind), sum(1 << packet for packet in row.packets), row.lowest, row.highest)
    for field in Properties.__struct_fields__
    for row in TABLE
    if row.name == field
)
"""`TABLE` in the order of the fields of `Properties`, for the encoder."""

_VARINT, _TEXT, _NAME, _BINARY, _PAIR = (int(kind) for kind in list(Kind)[3:])
_PUBLISH: Final = PacketType.PUBLISH
_EMPTY: Final = ()
_REPEATED: Final = {"user_properties", "subscription_identifiers"}

MISPLACED: Final[dict[int, ReasonCode]] = {
    PacketType.SUBSCRIBE: ReasonCode.MALFORMED_PACKET,
    PacketType.UNSUBSCRIBE: ReasonCode.MALFORMED_PACKET,
}
"""Reason codes for a well-formed property on the wrong packet, where it is not 0x82. Section 2.2.2.2 calls that
malformed, but no numbered clause fixes the code, so the codes are Mosquitto's."""


_READ: Final[dict[Kind, Callable[[Reader], Any]]] = {
    Kind.BYTE: lambda reader: reader.integer(1),
    Kind.TWO_BYTES: lambda reader: reader.integer(2),
    Kind.FOUR_BYTES: lambda reader: reader.integer(4),
    Kind.VARINT: Reader.varint,
    Kind.TEXT: Reader.text,
    Kind.NAME: Reader.name,
    Kind.BINARY: Reader.binary,
    Kind.PAIR: lambda reader: (reader.text(), reader.text()),
}


def decode_properties(reader: Reader, packet: int) -> Properties | None:
    """Read the property length and the properties behind it; None if there are none.

    `packet` is the packet's type or `WILL`. Of a PUBLISH with more user properties than the reader allows one more is
    read, and what follows is not.

    Raises:
        PeerError: a property is malformed, unknown, misplaced or repeated, or its value is not allowed; another packet
            has more user properties (0x97).
    """
    length = reader.varint()
    if not length:
        return None
    if length > reader.left:
        raise malformed("the packet ends inside its properties")
    block = Reader(reader.data, reader.position, reader.position + length)
    reader.position = block.end
    decoded: dict[str, Any] = {}
    while block.left:
        identifier = block.integer(1)  # a variable byte integer, but all known ones have one byte
        row = _BY_IDENTIFIER.get(identifier)
        if row is None:
            raise malformed(f"unknown property 0x{identifier:02X}")
        block.field = row.name
        value = _READ[row.kind](block)
        if row.kind <= _VARINT and not row.lowest <= value <= row.highest:
            raise PeerError(row.fault, f"{row.name} may not be {value}")
        if packet not in row.packets:
            code = MISPLACED.get(packet, ReasonCode.PROTOCOL_ERROR)
            raise PeerError(code, f"{row.name} is not allowed on {_name(packet)}")
        if row.kind == _PAIR or (row.kind == _VARINT and (packet == _PUBLISH or row.name not in decoded)):
            values = decoded.setdefault(row.name, [])
            values.append(value)
            if row.kind == _PAIR and len(values) > reader.most_pairs:
                if packet != _PUBLISH:
                    raise PeerError(ReasonCode.QUOTA_EXCEEDED, f"more than {reader.most_pairs} user properties")
                break
        elif row.name in decoded:
            raise protocol_error(f"{row.name} twice")
        else:
            decoded[row.name] = value
    for name in decoded.keys() & _REPEATED:
        decoded[name] = tuple(decoded[name])
    return Properties(**decoded)


def encode_properties(properties: Properties | None, packet: int) -> bytes:
    """Encode properties with their length prefix.

    Raises:
        UsageError: a property is not allowed on `packet`, or its value is not allowed.
    """
    if properties is None or properties is NONE:
        return b"\0"
    out = bytearray()
    bit = 1 << packet
    for (identifier, name, kind, mask, lowest, highest), value in zip(
        _FIELDS, msgspec.structs.astuple(properties), strict=True
    ):
        if value is None or value is _EMPTY:
            continue
        if not mask & bit:
            raise UsageError(f"{name} is not allowed on {_name(packet)}")
        if kind == _PAIR:
            for key, text in value:
                out.append(identifier)
                out += encode_text(key)
                out += encode_text(text)
        elif kind == _VARINT:
            for item in value:
                out.append(identifier)
                out += encode_varint(_in_range(name, item, lowest, highest))
        else:
            out.append(identifier)
            if kind == _BINARY:
                out += encode_binary(value)
            elif kind >= _TEXT:
                out += encode_text(value)
            else:
                out += _in_range(name, value, lowest, min(highest, (1 << 8 * kind) - 1)).to_bytes(kind)
    return encode_varint(len(out)) + out


def _in_range(name: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise UsageError(f"{name} may not be {value}")
    return value


def _name(packet: int) -> str:
    return "a will" if packet == WILL else PacketType(packet).name
