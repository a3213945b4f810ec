"""The records of kept sessions in `__trivium_sessions`: two per client id, as JSON.

`session/<client id>` changes with the session (CONNECT, SUBSCRIBE, the end of a connection), `flight/<client id>` with
its messages. Both are in the client id's partition, so they are read in the order of writing. If two gateways write one
session, the higher epoch wins. A tombstone for `release/<client id>` is a gateway's answer to a claim that it has
nothing of the session in flight: it is ordered with the other records, and compaction removes it.

`share/<group>` with a NUL and a filter behind it is where a shared subscription began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec

from mapping.record import Received
from protocols.mqtt.packets import Subscription, Version, Will
from protocols.mqtt.states import UNLIMITED

SESSION: Final = "session/"
INFLIGHT: Final = "flight/"
GATEWAY: Final = "gateway/"
RELEASE: Final = "release/"
SHARE: Final = "share/"
NEVER: Final = 0xFFFFFFFF  # Session Expiry Interval: the session does not expire (section 3.1.2.11.2)

PUBACK, PUBREC, PUBCOMP = 1, 2, 3  # the stages of a delivery, named after the packet that is awaited

# Decoding checks these ranges, since any authorized Kafka client may have written a record.
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
PacketId = Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Since the epoch; the limit is the largest integer that is exact in JSON."""

Offsets = dict[str, dict[NotNegative, NotNegative]]
"""Kafka topic -> partition -> offset."""


class Backlog(msgspec.Struct, frozen=True, array_like=True):
    """Messages that a subscription had not delivered when it was replaced by one at QoS 0 [MQTT-3.8.4-4]."""

    qos: Annotated[int, msgspec.Meta(ge=1, le=2)]  # at which they are delivered
    until: Offsets  # those below these offsets


class SessionSubscription(msgspec.Struct, frozen=True, omit_defaults=True):
    """A subscription: the options, and the Subscription Identifier (0: none)."""

    options: Subscription
    identifier: NotNegative = 0
    backlog: Backlog | None = None

    def for_record(self, record: Received) -> SessionSubscription:
        """Return the subscription as it applies to a record that is read late."""
        backlog = self.backlog
        if backlog is None or record.offset >= backlog.until.get(record.topic, {}).get(record.partition, 0):
            return self
        return SessionSubscription(msgspec.structs.replace(self.options, qos=backlog.qos), self.identifier)


class PendingWill(msgspec.Struct, frozen=True, omit_defaults=True):
    """A will, and what is needed to publish it after its connection, or its gateway, has ended."""

    will: Will  # from CONNECT
    version: Version  # for the record's headers
    due: Milliseconds | None = None  # when it is published; None while connected


class SessionRecord(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"session_id": "nonce", "predecessors": "from"}
):
    """The session record: the part of a session that changes rarely."""

    session_id: str  # unique for each session of the client id; `nonce` in JSON
    principal: str  # the only one that may use the session
    epoch: NotNegative  # raised by each CONNECT and each claim
    owner: str = ""  # the gateway that owns the session, as `id/incarnation`; "" for none
    expiry: Annotated[int, msgspec.Meta(ge=0, le=NEVER)] = 0  # Session Expiry Interval in seconds; `NEVER`
    gone_at: Milliseconds | None = None  # end of the connection; None while connected
    subscriptions: tuple[SessionSubscription, ...] = ()
    will: PendingWill | None = None
    unclean: bool = False  # the last gateway died, so the in-flight record may be outdated
    # gateways, beside `owner`, that may have QoS 2 messages of the session in flight to Kafka; `from` in JSON
    predecessors: tuple[str, ...] = ()


class InflightMessage(msgspec.Struct, array_like=True):
    """An unfinished delivery to the client: its packet identifier and the position of its record."""

    packet_id: PacketId
    topic: str  # Kafka topic of the record, or the topic of retained messages; "" if the topic was deleted
    partition: NotNegative
    offset: NotNegative
    stage: Annotated[int, msgspec.Meta(ge=PUBACK, le=PUBCOMP)]  # 1: PUBACK is awaited, 2: PUBREC, 3: PUBCOMP
    name: str = ""  # the MQTT topic of a retained message; "" for a record of the log


class PendingRetained(msgspec.Struct, array_like=True):
    """A subscription whose retained messages were not all sent."""

    topic_filter: str
    partition: int = -1  # messages up to this position in the topic of retained messages were sent
    offset: int = -1


class InflightRecord(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "session_id": "nonce",
        "messages": "flights",
        "pending_retained": "owed",
        "low_water_mark": "mark",
        "scan_from": "scan",
        "uncertain": "doubts",
        "released_by": "left",
    },
):
    """The in-flight record: the part of a session that changes often. JSON keeps the first version's names."""

    session_id: str
    epoch: NotNegative  # of the writer
    reached: Offsets = {}  # everything below was offered to the session; unfinished deliveries are in `messages`
    messages: tuple[InflightMessage, ...] = ()  # deliveries in flight, in the order of sending
    pending_retained: tuple[PendingRetained, ...] = ()  # subscriptions with retained messages still to be sent
    # inbound QoS 2 messages with a lower sequence are finished, except those in `open`
    low_water_mark: NotNegative = 0
    # packet identifier -> sequence of messages that are stored and wait for PUBREL
    open: dict[PacketId, NotNegative] = {}
    released: tuple[NotNegative, ...] = ()  # sequences from the low-water mark on that are finished
    # start offsets for finding QoS 2 messages from the low-water mark on, and uncertain ones
    scan_from: Offsets = {}
    # packet identifier -> sequence of QoS 2 messages that may be stored or not; the client got no answer
    uncertain: dict[PacketId, NotNegative] = {}
    final: bool = False  # the writer has released the session, and has nothing of it in flight
    # of the topics in `reached`, if Kafka has ids (`Router.topic_ids`); a recreated topic has another id
    topic_ids: Mapping[str, str] = {}
    # the gateway that released the session with this record, unasked, because it stops; `left` in JSON
    released_by: str = ""


class InflightHead(msgspec.Struct, frozen=True, rename={"released_by": "left"}):
    """The fields of an in-flight record that decide which of two is valid and whether the session is released."""

    epoch: int
    final: bool = False
    released_by: str = ""


class ShareRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a shared subscription, a group with one of its filters, began: the log's ends at its first SUBSCRIBE."""

    offsets: Offsets = {}  # in the topics that existed; later ones are newer than the subscription
    topic_ids: Mapping[str, str] = {}  # of these topics; a recreated topic has another id
    unknown: bool = False  # the group existed before: this filter may be as old


class GatewayRecord(msgspec.Struct, frozen=True):
    """A heartbeat of one gateway process."""

    incarnation: str
    at: int


Kind = TypeVar("Kind", SessionRecord, InflightRecord, InflightHead, GatewayRecord, ShareRecord)

encode = msgspec.json.encode


def decode(kind: type[Kind], value: bytes | None) -> Kind | None:
    """Decode a record of a kind; return None without a value or for an invalid one.

    The head of an in-flight record is enough for most records that are read.
    """
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
