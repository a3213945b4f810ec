"""Bodies and parameters of consumer requests: create, subscribe, assign, commit, seek, poll.

Bodies are validated against the contract before they are decoded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jsonschema_rs
import msgspec

from protocols.rest.errors import Fault, RestError, unprocessable
from protocols.rest.media import Format
from protocols.rest.requests import decode

_OPTIONS: Final = jsonschema_rs.RegexOptions()  # finite automata, of bounded size


class TopicPattern:
    """A client's regular expression for complete topic names, without look-around and back-references.

    It is matched in linear time, so no pattern can block the gateway.
    """

    def __init__(self, text: str) -> None:
        """Compile `text`; RestError 422 if it is not a supported expression."""
        self.text = text
        try:
            self._matcher = jsonschema_rs.Draft202012Validator(
                {"pattern": f"^(?:{text})$"}, pattern_options=_OPTIONS, validate_formats=False
            )
        except ValueError as error:
            raise unprocessable("The topic_pattern is not a supported regular expression") from error

    def matches(self, topic: str) -> bool:
        """Whether it matches the complete name."""
        return self._matcher.is_valid(topic)


class CreateConsumer(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The body of a request to create a consumer; the names are Kafka's. None means the gateway's default."""

    name: str | None = None
    format: str = Format.BINARY.value
    auto_offset_reset: str | None = msgspec.field(name="auto.offset.reset", default=None)
    enable_auto_commit: bool | None = msgspec.field(name="enable.auto.commit", default=None)
    fetch_min_bytes: int | None = msgspec.field(name="fetch.min.bytes", default=None)
    request_timeout_ms: int | None = msgspec.field(name="consumer.request.timeout.ms", default=None)
    isolation_level: str | None = msgspec.field(name="isolation.level", default=None)

    @property
    def embedded(self) -> Format:
        """The format as an enum."""
        return Format(self.format)


class Partition(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One partition of a topic."""

    topic: str
    partition: int


class PartitionOffset(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The offset of the next record to read in a partition."""

    topic: str
    partition: int
    offset: int
    metadata: str | None = None


class ConsumerSubscription(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Topics, or a regular expression for topic names. No topics means to unsubscribe."""

    topics: list[str] | None = None
    topic_pattern: str | None = None


class _Partitions(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    partitions: list[Partition]


class _Offsets(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    offsets: list[PartitionOffset]


class PollLimits(msgspec.Struct, frozen=True, gc=False):
    """How long a poll waits for the first record, and the size of its answer in bytes."""

    timeout_ms: int
    max_bytes: int


EXCLUSIVE: Final = "Subscriptions to topics, partitions, and patterns are mutually exclusive."
# Not strict: 1.0 is an integer for the contract, which has already refused other types.
_CREATE: Final = msgspec.json.Decoder(CreateConsumer, strict=False)
_SUBSCRIPTION: Final = msgspec.json.Decoder(ConsumerSubscription)
_PARTITIONS: Final = msgspec.json.Decoder(_Partitions, strict=False)
_OFFSETS: Final = msgspec.json.Decoder(_Offsets, strict=False)


def decode_create(body: bytes) -> CreateConsumer:
    """Decode a consumer's settings; all defaults for an empty body. RestError 400."""
    return decode(_CREATE, body) if body else CreateConsumer()


def decode_subscription(body: bytes) -> ConsumerSubscription:
    """Decode a subscription. RestError 400, or 409 for both topics and a pattern."""
    subscription = decode(_SUBSCRIPTION, body)
    if subscription.topics is not None and subscription.topic_pattern is not None:
        raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)
    return subscription


def decode_partitions(body: bytes) -> list[Partition]:
    """Decode the partitions of a request to assign, seek or look up. RestError 400."""
    return decode(_PARTITIONS, body).partitions


def decode_offsets(body: bytes) -> list[PartitionOffset]:
    """Decode the offsets to commit or to seek to. RestError 400."""
    return decode(_OFFSETS, body).offsets


def poll_limits(query: Mapping[str, int], default: PollLimits, largest: PollLimits) -> PollLimits:
    """Return the limits from a poll's query. Values above `largest` are reduced, since clients repeat polls anyway."""
    return PollLimits(
        min(query.get("timeout", default.timeout_ms), largest.timeout_ms),
        min(query.get("max_bytes", default.max_bytes), largest.max_bytes),
    )
