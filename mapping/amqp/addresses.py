"""AMQP addresses: the spellings of a Kafka topic, a partition of it, and a consumer group on it.

    T                    send; receive what is stored from now on
    T/partitions/N       send to one partition; receive from it alone
    T/ConsumerGroups/G/Partitions/N
                         receive from one partition, as Event Hubs spells it: its consumer groups commit nothing
    T/group.id/G         receive as a member of consumer group G
    T::S                 receive for the named subscription S, which is consumer group S
    T/anything/else      send with the key `anything/else` (the spelling of MQTT topics, so that a reply address
                         works in every protocol); of a queue also receive: what has this key

`topic://T`, `queue://T`, `/topics/T` and `/queues/T` are other spellings of `T`; who receives from a queue shares its
messages with the queue's other receivers (`gateway.amqp.sources`). Nothing here knows whether a topic
exists.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name
from protocols.amqp.outcomes import INVALID_FIELD, NOT_FOUND, UNAUTHORIZED_ACCESS, Error

_QUEUES: Final = ("queue://", "/queues/")
_PREFIXES: Final = ("topic://", "/topics/", *_QUEUES)
_PARTITION: Final = re.compile(r"(.+)/partitions/([0-9]{1,9})")
_EVENT_HUBS: Final = re.compile(r"(.+)/ConsumerGroups/[^/]+/Partitions/([0-9]{1,9})", re.IGNORECASE)
_GROUP: Final = "/group.id/"
_SUBSCRIPTION: Final = "::"
GROUP_LIMIT: Final = 249  # characters; Kafka has no bound, but the name becomes part of keys and metrics


class AddressError(Exception):
    """An address that cannot be served; `error` is the peer's answer."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(description)
        self.error = Error(condition, description)


class TargetAddress(msgspec.Struct, frozen=True):
    """Where a peer sends to. `key` is for messages that bring none."""

    topic: str
    partition: int | None = None
    key: bytes | None = None


class SourceAddress(msgspec.Struct, frozen=True):
    """Where a peer receives from."""

    topic: str  # the Kafka topic
    group: str | None = None  # the consumer group; None when the address names none
    subscription: bool = False  # the group was named as a subscription
    queue: bool = False  # the address is a queue's
    partition: int | None = None  # of this one alone; None is all
    key: bytes | None = None  # what has this key alone; of a queue only


def parse_target(address: str | None) -> TargetAddress:
    """The target of a peer's sending link. Raises AddressError."""
    path = path_of(address)
    found = _PARTITION.fullmatch(path)
    if found is not None:
        return TargetAddress(_topic(found[1]), int(found[2]))
    if _GROUP in path:
        raise AddressError(INVALID_FIELD, f"{address!r} is a consumer group: one receives from it")
    topic, slash, key = path.partition("/")
    return TargetAddress(_topic(topic), None, key.encode() if slash and key else None)


def parse_source(address: str | None) -> SourceAddress:
    """The source of a peer's receiving link. Raises AddressError."""
    path = path_of(address)
    topic, marker, group = path.partition(_GROUP)
    if marker:
        if not group or len(group) > GROUP_LIMIT:
            raise AddressError(INVALID_FIELD, f"{address!r} names no consumer group")
        return SourceAddress(_topic(topic), group)
    topic, marker, group = path.partition(_SUBSCRIPTION)
    if marker:
        if not group or len(group) > GROUP_LIMIT:
            raise AddressError(INVALID_FIELD, f"{address!r} names no subscription")
        return SourceAddress(_topic(topic), group, subscription=True)
    found = _PARTITION.fullmatch(path) or _EVENT_HUBS.fullmatch(path)
    if found is not None:
        return SourceAddress(_topic(found[1]), partition=int(found[2]))
    topic, slash, key = path.partition("/")
    if len(path) > GROUP_LIMIT:
        raise AddressError(INVALID_FIELD, f"the name of a queue has at most {GROUP_LIMIT} characters")
    queue = address is not None and address.startswith(_QUEUES)
    return SourceAddress(_topic(topic), queue=queue, key=key.encode() if slash and key else None)


def is_plain(address: str | None) -> bool:
    """Whether an address does not say itself what it is: neither a queue, nor a topic, nor who receives."""
    text = address or ""
    return not text.startswith(_PREFIXES) and _GROUP not in text and _SUBSCRIPTION not in text


def path_of(address: str | None) -> str:
    """An address without the prefix that is only a spelling. Raises AddressError when there is none."""
    if not address:
        raise AddressError(INVALID_FIELD, "a link needs an address")
    for prefix in _PREFIXES:
        if address.startswith(prefix):
            return address[len(prefix) :]
    return address


def _topic(name: str) -> str:
    if is_topic_name(name):
        return name
    if name.startswith(INTERNAL_TOPIC_PREFIX):
        raise AddressError(UNAUTHORIZED_ACCESS, "topics that begin with __ are internal")
    raise AddressError(NOT_FOUND, f"{name!r} is no Kafka topic name")
