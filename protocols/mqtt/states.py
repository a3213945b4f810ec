"""What is legal when: the states of a connection, the packets of each, PUBLISH's flags, and the limits."""

from __future__ import annotations

import enum
import functools
from typing import Final

import msgspec

from protocols.mqtt.decoding import check_flags
from protocols.mqtt.packets import Version
from protocols.mqtt.reasons import PacketType, malformed, protocol_error

UNLIMITED: Final = 65_535  # Receive Maximum when none is given (section 3.1.2.11.3)
LARGEST_PACKET: Final = 268_435_460  # what a remaining length can say, with the longest header

PublishFlags = tuple[tuple[int, bool, bool] | None, ...]
"""PUBLISH's four flags as (qos, retain, dup); None where they are refused."""


class State(enum.Enum):
    """Where a connection is."""

    NEW = "new"
    CONNECTING = "connecting"  # CONNECT is being judged; what the client sends ahead waits
    AUTHENTICATING = "authenticating"  # the same, with an authentication method: AUTH goes to and fro
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
    ),  # a second CONNECT is not among them [MQTT-3.1.0-2]
    State.CLOSED: frozenset(),
}  # fmt: skip
"""Which packets a client may send in which state. AUTH also needs a method in CONNECT [MQTT-4.12.0-7]."""


def check_legal(first: int, state: State, version: Version | None, method: str | None) -> None:
    """Judge a packet by its first byte, before the rest of it is awaited.

    Flags are judged when CONNECT has told the `version`; `method` is CONNECT's authentication method.

    Raises:
        PeerError: not allowed now, or with wrong flags.
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
    """Make the table of PUBLISH's flags.

    No QoS 3 [MQTT-3.3.1-4], no DUP at QoS 0 [MQTT-3.3.1-2], and nothing that the server said it does not have
    [MQTT-3.2.2-11], [MQTT-3.2.2-14].
    """
    table: list[tuple[int, bool, bool] | None] = []
    for flags in range(16):
        qos, retained, dup = flags >> 1 & 3, bool(flags & 1), bool(flags & 8)
        refused = qos == 3 or (dup and not qos) or qos > maximum_qos or (retained and not retain)
        table.append(None if refused else (qos, retained, dup))
    return tuple(table)


class Turn(enum.Enum):
    """Who speaks next in an exchange of AUTH (section 4.12)."""

    NOBODY = "nobody"  # there is no exchange
    CLIENT = "client"
    SERVER = "server"


class Awaits(enum.Enum):
    """What is next for a packet identifier of ours.

    The first four have a place in the client's Receive Maximum. The others do not: they began on an earlier connection
    of the session, and a quota is a connection's own [MQTT-4.9.0-1].
    """

    PUBACK = "PUBACK"
    PUBREC = "PUBREC"
    PUBREL = "PUBREL"  # ours to send: PUBREC came
    PUBCOMP = "PUBCOMP"
    RESERVED = "our message or PUBREL, again"
    RESUMED = "PUBCOMP of a resumed exchange"


class Limits(msgspec.Struct, frozen=True):
    """What one connection may ask of us."""

    max_connect_bytes: int = 65_536  # the largest packet before `accept`; a stranger gets no more
    max_packet_bytes: int = 2 * 1024 * 1024  # the largest packet after it; announced in CONNACK
    connect_timeout_s: float = 10.0  # how long CONNECT, and an exchange of AUTH, may take
    # most QoS 1 and 2 messages on the way to the client; its Receive Maximum may be lower
    outgoing_inflight: int = 1000
    outgoing_aliases: int = 64  # most topic aliases that are handed out; the client's Topic Alias Maximum may be lower
    enforce_receive_maximum: bool = True  # DISCONNECT 0x93 for a client that overruns ours; False tolerates it
    max_held_bytes: int = 1024 * 1024  # most bytes that a client may send ahead while its CONNECT is judged
