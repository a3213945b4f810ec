"""AMQP addresses: the spellings of a Kafka topic, a partition of it, and a consumer group on it.

    T                    send; receive what is stored from now on
    T/partitions/N       send to one partition
    T/group.id/G         receive as a member of consumer group G
    T/anything/else      send with the key `anything/else` (the spelling of MQTT topics, so that a reply address
                         works in every protocol)

`topic://T`, `queue://T`, `/topics/T` and `/queues/T` are other spellings of `T`. Nothing here knows whether a topic
exists.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name
from protocols.amqp.outcomes import INVALID_FIELD, NOT_FOUND, NOT_IMPLEMENTED, UNAUTHORIZED_ACCESS, Error

_PREFIXES: Final = ("topic://", "queue://", "/topics/", "/queues/")
_PARTITION: Final = re.compile(r"(.+)/partitions/([0-9]{1,9})")
_GROUP: Final = "/group.id/"
_DURABLE: Final = "::"
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
    """Where a peer receives from; `group` None is the tail of the log."""

    topic: str
    group: str | None = None


def parse_target(address: str | None) -> TargetAddress:
    """The target of a peer's sending link. Raises AddressError."""
    path = _stripped(address)
    found = _PARTITION.fullmatch(path)
    if found is not None:
        return TargetAddress(_topic(found[1]), int(found[2]))
    if _GROUP in path:
        raise AddressError(INVALID_FIELD, f"{address!r} is a consumer group: one receives from it")
    topic, slash, key = path.partition("/")
    return TargetAddress(_topic(topic), None, key.encode() if slash and key else None)


def parse_source(address: str | None) -> SourceAddress:
    """The source of a peer's receiving link. Raises AddressError."""
    path = _stripped(address)
    topic, marker, group = path.partition(_GROUP)
    if marker:
        if not group or len(group) > GROUP_LIMIT:
            raise AddressError(INVALID_FIELD, f"{address!r} names no consumer group")
        return SourceAddress(_topic(topic), group)
    if _DURABLE in path:
        raise AddressError(NOT_IMPLEMENTED, "named subscriptions are not offered; use T/group.id/G")
    if _PARTITION.fullmatch(path) or "/" in path:
        raise AddressError(NOT_IMPLEMENTED, "receiving from a part of a topic is not offered; use T or T/group.id/G")
    return SourceAddress(_topic(path))


def _stripped(address: str | None) -> str:
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
