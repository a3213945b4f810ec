"""AMQP addresses of Kafka topics, partitions and consumer groups.

    T                    send to topic T; receive records that are stored from now on
    T/partitions/N       send to one partition; receive only from it
    T/ConsumerGroups/G/Partitions/N
                         receive from one partition, in the syntax of Event Hubs, whose consumer groups commit nothing
    T/group.id/G         receive as a member of consumer group G
    T::S                 receive for the named subscription S, which is consumer group S
    T/anything/else      send with the key `anything/else` (the form of MQTT topics, so that a reply address works in
                         every protocol); if T is a queue, also receive the records with this key

`topic://T`, `queue://T`, `/topics/T` and `/queues/T` mean `T`. The receivers of a queue share its messages
(`gateway.amqp.sources`). Parsing does not check whether the topic exists.
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
GROUP_LIMIT: Final = 249  # characters; Kafka has no limit, but the name becomes part of keys and metrics


class AddressError(Exception):
    """An address that cannot be served; `error` is what the peer is answered."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(description)
        self.error = Error(condition, description)


class TargetAddress(msgspec.Struct, frozen=True):
    """A parsed target address; `key` is the default for messages without a key."""

    topic: str
    partition: int | None = None
    key: bytes | None = None


class SourceAddress(msgspec.Struct, frozen=True):
    """A parsed source address."""

    topic: str  # the Kafka topic
    group: str | None = None  # the consumer group; None when the address names none
    subscription: bool = False  # `group` is a named subscription (`T::S`)
    queue: bool = False  # the address has a queue prefix
    partition: int | None = None  # None means all partitions
    key: bytes | None = None  # only records with this key; only allowed for a queue


def parse_target(address: str | None) -> TargetAddress:
    """Parse the target address of a link on which the peer sends. Raises AddressError."""
    path = path_of(address)
    match = _PARTITION.fullmatch(path)
    if match is not None:
        return TargetAddress(_topic(match[1]), int(match[2]))
    if _GROUP in path:
        raise AddressError(INVALID_FIELD, f"{address!r} is a consumer group, which can only be a source")
    topic, slash, key = path.partition("/")
    return TargetAddress(_topic(topic), None, key.encode() if slash and key else None)


def parse_source(address: str | None) -> SourceAddress:
    """Parse the source address of a link on which the peer receives. Raises AddressError."""
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
    match = _PARTITION.fullmatch(path) or _EVENT_HUBS.fullmatch(path)
    if match is not None:
        return SourceAddress(_topic(match[1]), partition=int(match[2]))
    topic, slash, key = path.partition("/")
    if len(path) > GROUP_LIMIT:
        raise AddressError(INVALID_FIELD, f"the name of a queue has at most {GROUP_LIMIT} characters")
    queue = address is not None and address.startswith(_QUEUES)
    return SourceAddress(_topic(topic), queue=queue, key=key.encode() if slash and key else None)


def is_plain(address: str | None) -> bool:
    """Whether an address has neither a prefix nor a group or subscription, so that other fields decide what it is."""
    text = address or ""
    return not text.startswith(_PREFIXES) and _GROUP not in text and _SUBSCRIPTION not in text


def path_of(address: str | None) -> str:
    """Return an address without its prefix. Raises AddressError for an empty or missing address."""
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
