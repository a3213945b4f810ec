"""Confluent's REST proxy, version 2: what differs from the Strimzi bridge's dialect, in tables.

Paths, media types and bodies are the same where nothing is said here. Error bodies have the same fields; their numbers
have five digits: the status and which of its errors it is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from protocols.rest.consuming import CreateConsumer, PartitionOffset
from protocols.rest.errors import Fault, RestError, unprocessable
from protocols.rest.media import Format
from protocols.rest.requests import decode
from protocols.rest.responses import ErrorBody, Stored

PREFIX: Final = "v2"  # the first segment of the dialect's paths, whatever the setting says
SCHEMA_TYPES: Final = tuple(f"application/vnd.kafka.{name}.v2+json" for name in ("avro", "jsonschema", "protobuf"))
NO_REGISTRY: Final = "Payload error. Schema Registry must be configured when using schemas."
POLL_WAIT_MS: Final = 1000  # of a consumer that does not say it
LARGEST_INT: Final = 2**31 - 1


class Dialect(enum.Enum):
    """Whose operations stand at the paths that both have, such as `/topics/T`."""

    STRIMZI = "strimzi"
    CONFLUENT = "confluent"


NUMBERS: Final[dict[Fault, tuple[int, int]]] = {
    Fault.NO_NUMBER: (404, 404),
    Fault.TOPIC: (404, 40401),
    Fault.PARTITION: (404, 40402),
    Fault.CONSUMER: (404, 40403),
    Fault.CLUSTER: (404, 404),
    Fault.FORMAT: (406, 40601),
    Fault.NAME_TAKEN: (409, 40902),
    Fault.EXCLUSIVE: (409, 40903),
    Fault.NOT_ASSIGNED: (409, 40903),
    Fault.MEDIA: (415, 415),
    Fault.CONSUMER_CONFIG: (422, 42204),
    Fault.SCHEMA: (422, 42206),
    Fault.BATCH: (422, 42208),
}
"""The status and number of a refusal by what it is about."""
STATUS_NUMBERS: Final = {401: 40101, 403: 40301, 429: 42901, 500: 50002, 503: 50301}
"""The number where the status says enough; any other is its own number."""
RECORD_NUMBERS: Final = {403: 40301, 404: 40402, 500: 50002, 503: 50003}
"""The number of a single record's error; any other is 50002, Kafka's error."""
_KAFKA_ERROR: Final = 50002


WORDS: Final[dict[Fault, str]] = {
    Fault.CONSUMER: "Consumer instance not found.",
    Fault.NAME_TAKEN: "Consumer with specified consumer ID already exists in the specified consumer group.",
    Fault.EXCLUSIVE: (
        "IllegalStateError: You must choose only one way to configure your consumer: (1) subscribe to specific topics "
        "by name, (2) subscribe to topics matching a regex pattern, (3) assign itself specific topic-partitions."
    ),
}
"""What users' code looks for: Confluent's words, and where Karapace has others (`EXCLUSIVE`), which are those of the
client library beneath it, Karapace's. What names more than they do, such as a topic, keeps its own."""


def message(error: RestError) -> str:
    """What a refusal says in this dialect."""
    return error.message if error.fault is None else WORDS.get(error.fault, error.message)


def number(error: RestError) -> tuple[int, int]:
    """The status and number of a refusal. What does not fit the contract's schemas is a 422."""
    if error.fault is not None:
        return NUMBERS[error.fault]
    status = 422 if error.status == 400 and error.validation_errors else error.status
    return status, STATUS_NUMBERS.get(status, status)


class RecordResult(msgspec.Struct, frozen=True, gc=False):
    """What became of one record: a place, or an error."""

    partition: int | None = None
    offset: int | None = None
    error_code: int | None = None
    error: str | None = None


class ProduceResults(msgspec.Struct, frozen=True):
    """The answer to a produce request; there are no schemas."""

    offsets: Sequence[RecordResult]
    key_schema_id: int | None = None
    value_schema_id: int | None = None


def produce_results(results: Sequence[Stored | ErrorBody]) -> ProduceResults:
    """The answer to a produce request, one entry for each record, in the order of the request."""
    return ProduceResults(
        [
            RecordResult(result.partition, result.offset)
            if isinstance(result, Stored)
            else RecordResult(
                error_code=RECORD_NUMBERS.get(result.error_code, _KAFKA_ERROR),
                error=result.message,
            )
            for result in results
        ]
    )


class ConsumerConfig(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The body of a consumer's creation: most values may be text."""

    id: str | None = None
    name: str | None = None
    format: str = Format.BINARY.value
    auto_offset_reset: str | None = msgspec.field(name="auto.offset.reset", default=None)
    auto_commit: str | bool | None = msgspec.field(name="auto.commit.enable", default=None)
    fetch_min_bytes: str | int | None = msgspec.field(name="fetch.min.bytes", default=None)
    wait_ms: str | int | None = msgspec.field(name="consumer.request.timeout.ms", default=None)
    metadata_ms: str | int | None = msgspec.field(name="topic.metadata.refresh.interval.ms", default=None)  # not used
    isolation_level: str | None = msgspec.field(name="isolation.level", default=None)


class Consumer(msgspec.Struct, frozen=True):
    """A consumer as it is wanted: its settings, and how long its polls wait where they do not say it."""

    create: CreateConsumer
    wait_ms: int


class PartitionTime(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A position by time: of the first record that is not older."""

    topic: str
    partition: int
    timestamp: str
    metadata: str | None = None


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to read on."""

    offsets: list[PartitionOffset] = []
    timestamps: list[PartitionTime] = []


class _Commit(msgspec.Struct, forbid_unknown_fields=True):
    offsets: list[PartitionOffset] | None = None


_CONSUMER: Final = msgspec.json.Decoder(ConsumerConfig)
_POSITIONS: Final = msgspec.json.Decoder(Positions, strict=False)
_COMMIT: Final = msgspec.json.Decoder(_Commit, strict=False)
_FORMATS: Final = frozenset(one.value for one in Format)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def decode_consumer(body: bytes) -> Consumer:
    """A consumer's settings; all defaults for an empty body; RestError: 422, a consumer cannot be so."""
    config = decode(_CONSUMER, body) if body else ConsumerConfig()
    if config.format not in _FORMATS:
        raise RestError(422, f"Invalid format type: {config.format[:32]}", fault=Fault.CONSUMER_CONFIG)
    create: dict[str, Any] = {"name": config.name or config.id, "format": config.format}
    if config.auto_offset_reset is not None:
        create["auto_offset_reset"] = config.auto_offset_reset
    if config.auto_commit is not None:
        create["enable_auto_commit"] = config.auto_commit in (True, "true")
    if config.fetch_min_bytes is not None:  # -1: whatever is there
        create["fetch_min_bytes"] = max(1, _integer(config.fetch_min_bytes, -1, "fetch.min.bytes"))
    if config.isolation_level is not None:
        create["isolation_level"] = config.isolation_level
    wait_ms = POLL_WAIT_MS
    if config.wait_ms is not None:
        wait_ms = _integer(config.wait_ms, 1, "consumer.request.timeout.ms")
    return Consumer(CreateConsumer(**create), wait_ms)


def _integer(value: str | int, least: int, name: str) -> int:
    found = int(value)
    if not least <= found <= LARGEST_INT:
        raise RestError(422, f"Invalid value {found} for configuration {name}", fault=Fault.CONSUMER_CONFIG)
    return found


def decode_positions(body: bytes) -> Positions:
    """Where to read on. The body fits the contract, or RestError 400."""
    return decode(_POSITIONS, body)


def decode_commit(body: bytes) -> list[PartitionOffset] | None:
    """The offsets to commit; None, also for `{}`: of all that was delivered. It fits the contract, or RestError 400."""
    return decode(_COMMIT, body).offsets if body else None


def epoch_ms(text: str) -> int:
    """Milliseconds since the epoch of an ISO 8601 time with its zone; RestError: 422."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise unprocessable(f"{text[:40]!r} is no time in ISO 8601") from error
    if moment.tzinfo is None:
        raise unprocessable(f"{text[:40]!r} does not say its time zone")
    since = (moment - _EPOCH) // timedelta(milliseconds=1)
    if since < 0:
        raise unprocessable(f"{text[:40]!r} is before 1970")
    return since


def poll_wanted(query: Mapping[str, int]) -> dict[str, int]:
    """What a poll's query says; -1 is what holds without it."""
    return {name: value for name, value in query.items() if value >= 0}
