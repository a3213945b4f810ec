"""The states of a connection, the packets allowed in each, PUBLISH's flags, and the connection's limits."""

from __future__ import annotations

import enum
import functools
from typing import Final

import msgspec

from protocols.mqtt.decoding import check_flags
from protocols.mqtt.packets import Version
from protocols.mqtt.reasons import PacketType, malformed, protocol_error

UNLIMITED: Final = 65_535  # default Receive Maximum (section 3.1.2.11.3)
LARGEST_PACKET: Final = 268_435_460  # the largest remaining length plus the longest header

PublishFlags = tuple[tuple[int, bool, bool] | None, ...]
"""For each value of PUBLISH's four flags: (qos, retain, dup), or None if it is refused."""


class State(enum.Enum):
    """The state of a connection."""

    NEW = "new"
    CONNECTING = "connecting"  # CONNECT waits for its answer; packets sent ahead are buffered
    AUTHENTICATING = "authenticating"  # the same, with AUTH packets being exchanged
    OPEN = "open"
    CLOSED = "closed"


_T: Final = PacketType
LEGAL: Final[dict[State, frozenset[PacketType]]] = {
    State.NEW: frozenset({_T.CONNECT}),  # [MQTT-3.1.0-1]
    State.CONNECTING: frozenset(),  # nothing is parsed
    State.AUTHENTICATING: frozenset({_T.AUTH, _T.DISCONNECT}),  # [MQTT-3.1.2-30]
    State.OPEN: frozenset(
        {
            _T.PUBLISH, _T.PUBACK, _T.PUBREC, _T.PUBREL, _T.PUBCOMP, _T.SUBSCRIBE, _T.UNSUBSCRIBE, _T.PINGREQ,
            _T.DISCONNECT, _T.AUTH,
        }
    ),  # not a second CONNECT [MQTT-3.1.0-2]
    State.CLOSED: frozenset(),
}  # fmt: skip
"""The packets that a client may send in each state. AUTH also needs a method in CONNECT [MQTT-4.12.0-7]."""


def check_legal(first: int, state: State, version: Version | None, method: str | None) -> None:
    """Check a packet by its first byte, before the rest is received.

    Flags are checked only with a known `version`, after CONNECT. `method` is CONNECT's authentication method.

    Raises:
        PeerError: the packet is not allowed now, or its flags are wrong.
    """
    kind = first >> 4
    if kind not in LEGAL[state]:
        if first & 0x0F and kind in (PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP):
            raise malformed("reserved flags are set")
        raise protocol_error(f"packet type {kind} is not allowed in state {state.value}")
    if kind == PacketType.AUTH and method is None:
        raise protocol_error("AUTH without an authentication method in CONNECT")  # [MQTT-4.12.0-7]
    if version is not None:
        check_flags(first, version)


@functools.cache
def publish_flags(maximum_qos: int = 2, retain: bool = True) -> PublishFlags:
    """Create the table of PUBLISH's flags.

    Refused are QoS 3 [MQTT-3.3.1-4], DUP at QoS 0 [MQTT-3.3.1-2], and features that the server announced as not
    available [MQTT-3.2.2-11], [MQTT-3.2.2-14].
    """
    table: list[tuple[int, bool, bool] | None] = []
    for flags in range(16):
        qos, retained, dup = flags >> 1 & 3, bool(flags & 1), bool(flags & 8)
        refused = qos == 3 or (dup and not qos) or qos > maximum_qos or (retained and not retain)
        table.append(None if refused else (qos, retained, dup))
    return tuple(table)


class Turn(enum.Enum):
    """The side that sends next in an exchange of AUTH (section 4.12)."""

    NONE = "none"  # there is no exchange
    CLIENT = "client"
    SERVER = "server"


class Awaits(enum.Enum):
    """The next packet for a packet identifier of a message to the client.

    The first four count against the client's Receive Maximum. The others do not: they started on an earlier connection
    of the session, and the quota is per connection [MQTT-4.9.0-1].
    """

    PUBACK = "PUBACK"
    PUBREC = "PUBREC"
    PUBREL = "PUBREL"  # to be sent by us, after PUBREC
    PUBCOMP = "PUBCOMP"
    RESERVED = "our message or PUBREL, again"
    RESUMED = "PUBCOMP of a resumed exchange"


class PacketLimits(msgspec.Struct, frozen=True):
    """The limits of one connection."""

    max_connect_bytes: int = 65_536  # largest packet before `accept`, while the client is not authenticated
    max_packet_bytes: int = 2 * 1024 * 1024  # largest packet after `accept`; announced in CONNACK
    max_user_properties: int = 1 << 31  # no more are decoded; see `decoding.decode_packet`
    connect_timeout_s: float = 10.0  # for CONNECT, and for an exchange of AUTH
    # maximum number of QoS 1 and 2 messages in flight to the client; its Receive Maximum may be lower
    outgoing_inflight: int = 1000
    outgoing_aliases: int = 64  # maximum number of topic aliases to the client; its Topic Alias Maximum may be lower
    enforce_receive_maximum: bool = True  # DISCONNECT 0x93 for a client that exceeds our Receive Maximum
    max_held_bytes: int = 1024 * 1024  # maximum number of bytes that a client may send ahead of CONNACK
