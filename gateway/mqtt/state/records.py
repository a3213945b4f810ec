"""What a kept session leaves in `__trivium_sessions`: two records per client id, readable JSON.

`session/<client id>` changes when the session does (CONNECT, SUBSCRIBE, the end of a connection). `flight/<client id>`
changes with its messages. Both lie in the client id's partition, so they are read in the order in which they were
written; of two gateways that write one session the higher epoch is right. A deletion of `release/<client id>` is how a
gateway that has nothing of a session answers who claims it: it is read in its place, and compaction takes it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from protocols.mqtt.packets import Subscription, Version, Will

SESSION: Final = "session/"
INFLIGHT: Final = "flight/"
GATEWAY: Final = "gateway/"
RELEASE: Final = "release/"
NEVER: Final = 0xFFFFFFFF  # Session Expiry Interval: the session does not expire (section 3.1.2.11.2)

PUBACK, PUBREC, PUBCOMP = 1, 2, 3  # what is awaited: the stages of a delivery

Places = dict[str, dict[int, int]]
"""Kafka topic -> partition -> offset."""


class SessionSubscription(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a session subscribed with: the options and the Subscription Identifier, 0 when it gave none."""

    options: Subscription
    identifier: int = 0


class PendingWill(msgspec.Struct, frozen=True, omit_defaults=True):
    """A will and what is needed to publish it when its client, or the gateway that knew it, is gone."""

    will: Will  # as CONNECT had it
    version: Version  # of the protocol, for the record's headers
    due: int | None = None  # epoch milliseconds at which it is published; None while its connection lives


class SessionRecord(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"session_id": "nonce", "predecessors": "from"}
):
    """The slow half of a session."""

    session_id: str  # a later session of the client id has another; `nonce` in JSON
    principal: str  # who opened it; nobody else gets it
    epoch: int  # counts the gateways that had it
    owner: str = ""  # the gateway that has it, an `id/incarnation`; "" when none has
    expiry: int = 0  # Session Expiry Interval in seconds; `NEVER`
    gone_at: int | None = None  # epoch milliseconds of the end of its connection; None while connected
    subscriptions: tuple[SessionSubscription, ...] = ()  # as subscribed
    will: PendingWill | None = None  # what is to be published for it
    unclean: bool = False  # its last gateway died, so its in-flight record may be old
    # who beside `owner` may have a QoS 2 message of it on the way to Kafka; `from` in JSON
    predecessors: tuple[str, ...] = ()


class InflightMessage(msgspec.Struct, array_like=True):
    """A delivery to the client that it has not acknowledged to the end: where its record is, under which id it went."""

    packet_id: int  # ours
    topic: str  # its Kafka topic, or the topic of retained messages; "" when it was deleted
    partition: int  # of the record
    offset: int  # of the record
    stage: int  # 1: PUBACK is awaited, 2: PUBREC, 3: PUBCOMP
    name: str = ""  # the MQTT topic of a retained message; "" for a record of the log


class PendingRetained(msgspec.Struct, array_like=True):
    """A subscription whose retained messages were not all sent."""

    topic_filter: str  # of the subscription
    partition: int = -1  # those up to this place in the topic of retained messages were sent
    offset: int = -1  # in that partition


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
    """The quick half of a session: the in-flight record. The names in JSON are those of the first version."""

    session_id: str  # the session's
    epoch: int  # of its writer
    reached: Places = {}  # everything below was offered to the session; what of it is unfinished is in `messages`
    messages: tuple[InflightMessage, ...] = ()  # deliveries in flight, in the order in which they were sent
    pending_retained: tuple[PendingRetained, ...] = ()  # subscriptions that are still to be sent retained messages
    # of the client's QoS 2 messages with a lower sequence, those that are unfinished are in `open`
    low_water_mark: int = 0
    open: dict[int, int] = {}  # packet identifier -> sequence of those that are stored and not released
    released: tuple[int, ...] = ()  # sequences from the low-water mark on that are released
    # the offsets from which on QoS 2 messages above the low-water mark, and uncertain ones, can be found
    scan_from: Places = {}
    # packet identifier -> sequence of QoS 2 messages that may be stored or not; the client was not told
    uncertain: dict[int, int] = {}
    final: bool = False  # its writer has released the session: this is all there is to know
    # of the topics in `reached`, where Kafka tells them (`Router.topic_ids`). A topic with another one was deleted and
    # made again
    topic_ids: Mapping[str, str] = {}
    # the gateway that has released the session by this record without being asked, because it stops; `left` in JSON
    released_by: str = ""


class InflightHead(msgspec.Struct, frozen=True, rename={"released_by": "left"}):
    """What of an in-flight record says which of two is right, and who has nothing of the session; see there."""

    epoch: int
    final: bool = False
    released_by: str = ""


class GatewayRecord(msgspec.Struct, frozen=True):
    """A heartbeat of one gateway process."""

    incarnation: str
    at: int


Kind = TypeVar("Kind", SessionRecord, InflightRecord, InflightHead, GatewayRecord)

encode = msgspec.json.encode
_SESSION: Final = msgspec.json.Decoder(SessionRecord)
_INFLIGHT: Final = msgspec.json.Decoder(InflightRecord)
_INFLIGHT_HEAD: Final = msgspec.json.Decoder(InflightHead)
_GATEWAY: Final = msgspec.json.Decoder(GatewayRecord)


def decode_session(value: bytes | None) -> SessionRecord | None:
    """Read a session's record; None when there is none or it is not ours."""
    return _decode(_SESSION, value)


def decode_inflight(value: bytes | None) -> InflightRecord | None:
    """Read an in-flight record; None when there is none or it is not ours."""
    return _decode(_INFLIGHT, value)


def decode_inflight_head(value: bytes | None) -> InflightHead | None:
    """The same, without what need not be known of every record that is followed."""
    return _decode(_INFLIGHT_HEAD, value)


def decode_gateway(value: bytes | None) -> GatewayRecord | None:
    """Read a heartbeat; None when there is none or it is not ours."""
    return _decode(_GATEWAY, value)


def _decode(decoder: msgspec.json.Decoder[Kind], value: bytes | None) -> Kind | None:
    if value is None:
        return None
    try:
        return decoder.decode(value)
    except msgspec.DecodeError:
        return None
