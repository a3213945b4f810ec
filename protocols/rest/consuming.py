"""Bodies and parameters of consumer requests: create, subscribe, assign, commit, seek, poll.

The contract has judged a body before it comes here.
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
    """A client's regular expression for whole names of topics, without look-around and back-references.

    It is matched in linear time, so that none can stop the gateway.
    """

    def __init__(self, text: str) -> None:
        """Compile `text`; RestError: 422, it is no such expression."""
        self.text = text
        try:
            self._matcher = jsonschema_rs.Draft202012Validator(
                {"pattern": f"^(?:{text})$"}, pattern_options=_OPTIONS, validate_formats=False
            )
        except ValueError as error:
            raise unprocessable("The topic_pattern is no regular expression that is served") from error

    def matches(self, topic: str) -> bool:
        """Whether it fits the whole name."""
        return self._matcher.is_valid(topic)


class CreateConsumer(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The body of a consumer's creation; the names are Kafka's own. None: as the gateway is set."""

    name: str | None = None
    format: str = Format.BINARY.value
    auto_offset_reset: str | None = msgspec.field(name="auto.offset.reset", default=None)
    enable_auto_commit: bool | None = msgspec.field(name="enable.auto.commit", default=None)
    fetch_min_bytes: int | None = msgspec.field(name="fetch.min.bytes", default=None)
    request_timeout_ms: int | None = msgspec.field(name="consumer.request.timeout.ms", default=None)
    isolation_level: str | None = msgspec.field(name="isolation.level", default=None)

    @property
    def embedded(self) -> Format:
        """The format, as the contract has it."""
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


class Subscription(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Topics, or a regular expression of topics' names; no topics: nothing."""

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


EXCLUSIVE: Final = "Subscriptions to topics, partitions, and patterns are mutually exclusive."
# Not strict: 1.0 is an integer to the contract, which has refused other types before.
_CREATE: Final = msgspec.json.Decoder(CreateConsumer, strict=False)
_SUBSCRIPTION: Final = msgspec.json.Decoder(Subscription)
_PARTITIONS: Final = msgspec.json.Decoder(_Partitions, strict=False)
_OFFSETS: Final = msgspec.json.Decoder(_Offsets, strict=False)


def decode_create(body: bytes) -> CreateConsumer:
    """A consumer's settings; all defaults for an empty body. The body fits the contract, or RestError 400."""
    return decode(_CREATE, body) if body else CreateConsumer()


def decode_subscription(body: bytes) -> Subscription:
    """What to subscribe to. The body fits the contract; RestError: 400, or 409 for topics and a pattern."""
    subscription = decode(_SUBSCRIPTION, body)
    if subscription.topics is not None and subscription.topic_pattern is not None:
        raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)
    return subscription


def decode_partitions(body: bytes) -> list[Partition]:
    """The partitions of a request to assign, seek or look up. The body fits the contract, or RestError 400."""
    return decode(_PARTITIONS, body).partitions


def decode_offsets(body: bytes) -> list[PartitionOffset]:
    """The offsets to commit or to seek to. The body fits the contract, or RestError 400."""
    return decode(_OFFSETS, body).offsets


def poll_limits(query: Mapping[str, int], default: PollLimits, largest: PollLimits) -> PollLimits:
    """The limits in a poll's query.

    Longer waiting than allowed is cut, since a poll that comes back empty is repeated anyway; so are more bytes.
    """
    return PollLimits(
        min(query.get("timeout", default.timeout_ms), largest.timeout_ms),
        min(query.get("max_bytes", default.max_bytes), largest.max_bytes),
    )
