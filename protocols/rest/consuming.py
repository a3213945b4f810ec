"""Bodies and parameters of consumer requests: create, subscribe, assign, commit, seek, poll."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from protocols.rest.errors import RestError, unprocessable
from protocols.rest.media import Format
from protocols.rest.requests import decode

LARGEST_PARTITION: Final = 2**31 - 1
LARGEST_OFFSET: Final = 2**63 - 1
NAME_LIMIT: Final = 255  # characters of a consumer's and a group's name: they stand in paths and in Kafka's log
_RESETS: Final = frozenset({"earliest", "latest", "none"})
_ISOLATIONS: Final = frozenset({"read_committed", "read_uncommitted"})
_INT32: Final = 2**31 - 1


class CreateConsumer(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The body of a consumer's creation; the names are Kafka's own. Types are strict: "true" is no boolean."""

    name: str | None = None
    format: str = Format.BINARY.value
    auto_offset_reset: str = msgspec.field(name="auto.offset.reset", default="latest")
    enable_auto_commit: bool = msgspec.field(name="enable.auto.commit", default=True)
    fetch_min_bytes: int = msgspec.field(name="fetch.min.bytes", default=1)
    request_timeout_ms: int | None = msgspec.field(name="consumer.request.timeout.ms", default=None)
    isolation_level: str = msgspec.field(name="isolation.level", default="read_uncommitted")

    @property
    def embedded(self) -> Format:
        """The format as checked by `decode_create`."""
        return Format(self.format)


class Partition(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One partition of a topic."""

    topic: str
    partition: int


class PartitionOffset(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A position: the offset of the next record to be read, as given, without adding one."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""


class _Subscription(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    topics: list[str] | None = None
    topic_pattern: str | None = None


class _Partitions(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    partitions: list[Partition]


class _Offsets(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    offsets: list[PartitionOffset]


class PollLimits(msgspec.Struct, frozen=True, gc=False):
    """How long a poll waits for the first record, and at how many encoded bytes it stops."""

    timeout_ms: int
    max_bytes: int


_CREATE: Final = msgspec.json.Decoder(CreateConsumer)
_SUBSCRIPTION: Final = msgspec.json.Decoder(_Subscription)
_PARTITIONS: Final = msgspec.json.Decoder(_Partitions)
_OFFSETS: Final = msgspec.json.Decoder(_Offsets)


def decode_create(body: bytes) -> CreateConsumer:
    """A consumer's settings; all defaults for an empty body.

    Raises:
        RestError: 400 for unknown fields and wrong types, 422 for values that mean nothing.
    """
    create = decode(_CREATE, body) if body else CreateConsumer()
    if create.format not in (known.value for known in Format):
        raise unprocessable(f"Invalid format type: {create.format}")
    if create.auto_offset_reset not in _RESETS:
        raise unprocessable(f"Invalid value {create.auto_offset_reset} for configuration auto.offset.reset")
    if create.isolation_level not in _ISOLATIONS:
        raise unprocessable(f"Invalid value {create.isolation_level} for configuration isolation.level")
    if not 0 <= create.fetch_min_bytes <= _INT32:
        raise unprocessable(f"Invalid value {create.fetch_min_bytes} for configuration fetch.min.bytes")
    if create.request_timeout_ms is not None and not 1 <= create.request_timeout_ms <= _INT32:
        raise unprocessable(f"Invalid value {create.request_timeout_ms} for configuration consumer.request.timeout.ms")
    if create.name is not None and not 0 < len(create.name) <= NAME_LIMIT:
        raise unprocessable(f"A consumer's name has 1 to {NAME_LIMIT} characters")
    return create


def decode_subscription(body: bytes) -> list[str]:
    """The topics to subscribe to; none: unsubscribe.

    Raises:
        RestError: 400 for a body against the contract, 409 for topics and a pattern, 422 for neither, 501 for a
            pattern, which is not served yet.
    """
    subscription = decode(_SUBSCRIPTION, body)
    if subscription.topics is not None and subscription.topic_pattern is not None:
        raise RestError(409, "Subscriptions to topics, partitions, and patterns are mutually exclusive.")
    if subscription.topic_pattern is not None:
        raise RestError(501, "A topic_pattern is not supported by this version; give a list of topics")
    if subscription.topics is None:
        raise unprocessable("A list (of Topics type) or a topic_pattern must be specified.")
    return list(dict.fromkeys(subscription.topics))


def decode_partitions(body: bytes) -> list[Partition]:
    """The partitions to be assigned, or to seek in. Raises RestError 400, or 422 for a number out of range."""
    partitions = decode(_PARTITIONS, body).partitions
    for entry in partitions:
        _check_partition(entry.partition)
    return partitions


def decode_offsets(body: bytes) -> list[PartitionOffset]:
    """The offsets to commit or to seek to. Raises RestError 400, or 422 for a number out of range."""
    offsets = decode(_OFFSETS, body).offsets
    for entry in offsets:
        _check_partition(entry.partition)
        if not 0 <= entry.offset <= LARGEST_OFFSET:
            raise unprocessable(f"The offset {entry.offset} is out of range")
    return offsets


def poll_limits(query: Mapping[str, int], default: PollLimits, largest: PollLimits) -> PollLimits:
    """The limits in a poll's query.

    Longer waiting than allowed is cut, since a poll that comes back empty is repeated anyway; so are more bytes.
    """
    return PollLimits(
        min(query.get("timeout", default.timeout_ms), largest.timeout_ms),
        min(query.get("max_bytes", default.max_bytes), largest.max_bytes),
    )


def _check_partition(partition: int) -> None:
    if not 0 <= partition <= LARGEST_PARTITION:
        raise unprocessable(f"The partition {partition} is out of range")
