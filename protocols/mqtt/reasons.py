"""Reason codes of MQTT 5.0 (section 2.4), the packets that may carry them, and CONNACK return codes of 3.1.1."""

from __future__ import annotations

import enum
from typing import Final

from protocols.errors import PeerError


class PacketType(enum.IntEnum):
    """The four high bits of the first byte (section 2.1.2)."""

    RESERVED = 0
    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15


class ReasonCode(enum.IntEnum):
    """All reason codes of MQTT 5.0; from 0x80 on they are errors."""

    SUCCESS = 0x00  # also: normal disconnection, granted QoS 0
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL_MESSAGE = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    RE_AUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_IN_USE = 0x91
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


def _codes(*codes: int) -> frozenset[int]:
    return frozenset(ReasonCode(code) for code in codes)


_PUBLISH_ANSWER: Final = _codes(0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)
_RELEASE: Final = _codes(0x00, 0x92)

REASON_CODES: Final[dict[PacketType, frozenset[int]]] = {
    PacketType.CONNACK: _codes(
        0x00, 0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8A, 0x8C, 0x90, 0x95, 0x97, 0x99,
        0x9A, 0x9B, 0x9C, 0x9D, 0x9F,
    ),
    PacketType.PUBACK: _PUBLISH_ANSWER,
    PacketType.PUBREC: _PUBLISH_ANSWER,
    PacketType.PUBREL: _RELEASE,
    PacketType.PUBCOMP: _RELEASE,
    PacketType.SUBACK: _codes(
        0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2
    ),
    PacketType.UNSUBACK: _codes(0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91),
    PacketType.DISCONNECT: _codes(
        0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x96,
        0x97, 0x98, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9E, 0x9F, 0xA0, 0xA1, 0xA2,
    ),
    PacketType.AUTH: _codes(0x00, 0x18, 0x19),
}  # fmt: skip
"""The reason codes that each packet may carry (sections 3.2.2.2, 3.4.2.1 to 3.7.2.1, 3.9.3, 3.11.3, 3.14.2.1,
3.15.2.1)."""

CLIENT_DISCONNECT_CODES: Final = _codes(
    0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99
)
"""The reason codes that a client may send in DISCONNECT (table 3-13)."""


class ReturnCode(enum.IntEnum):
    """CONNACK's return code in MQTT 3.1.1 (section 3.2.2.3) and 3.1."""

    ACCEPTED = 0
    UNACCEPTABLE_PROTOCOL_VERSION = 1
    IDENTIFIER_REJECTED = 2
    SERVER_UNAVAILABLE = 3
    BAD_USER_NAME_OR_PASSWORD = 4
    NOT_AUTHORIZED = 5


RETURN_CODES: Final[dict[int, ReturnCode]] = {
    ReasonCode.SUCCESS: ReturnCode.ACCEPTED,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: ReturnCode.UNACCEPTABLE_PROTOCOL_VERSION,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: ReturnCode.IDENTIFIER_REJECTED,
    ReasonCode.SERVER_UNAVAILABLE: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.SERVER_BUSY: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.SERVER_SHUTTING_DOWN: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.CONNECTION_RATE_EXCEEDED: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.QUOTA_EXCEEDED: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.USE_ANOTHER_SERVER: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.SERVER_MOVED: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: ReturnCode.BAD_USER_NAME_OR_PASSWORD,
    ReasonCode.NOT_AUTHORIZED: ReturnCode.NOT_AUTHORIZED,
    ReasonCode.BANNED: ReturnCode.NOT_AUTHORIZED,
}
"""Return codes for 3.1.1 clients; for other reasons the connection is closed without CONNACK [MQTT311-3.2.2-6]."""


def malformed(reason: str) -> PeerError:
    """Return the error for a packet that cannot be parsed (section 4.13.1)."""
    return PeerError(ReasonCode.MALFORMED_PACKET, reason)


def protocol_error(reason: str) -> PeerError:
    """Return the error for a packet that can be parsed but is not allowed here (section 4.13.1)."""
    return PeerError(ReasonCode.PROTOCOL_ERROR, reason)
