"""The differences between the dialect of Confluent's REST proxy version 2 and that of the Strimzi bridge, in tables.

All other paths, media types and bodies are the same. Error bodies have the same fields; their codes have five digits:
the status, and two digits for the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from protocols.rest.consuming import CreateConsumer, PartitionOffset
from protocols.rest.errors import Fault, RestError, unprocessable
from protocols.rest.media import Format
from protocols.rest.requests import decode
from protocols.rest.responses import ErrorBody, Stored

SCHEMA_TYPES: Final = tuple(f"application/vnd.kafka.{name}.v2+json" for name in ("avro", "jsonschema", "protobuf"))
NO_REGISTRY: Final = "Payload error. Schema Registry must be configured when using schemas."
POLL_WAIT_MS: Final = 1000  # default of a consumer
LARGEST_INT: Final = 2**31 - 1


NUMBERS: Final[dict[Fault, tuple[int, int]]] = {
    Fault.BAD_NUMBER: (404, 404),
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
"""Status and error code by cause."""
STATUS_NUMBERS: Final = {401: 40101, 403: 40301, 429: 42901, 500: 50002, 503: 50301}
"""The error code by status, for errors without a cause; by default the status itself."""
RECORD_NUMBERS: Final = {403: 40301, 404: 40402, 500: 50002, 503: 50003}
"""The error code of a single record by status; by default 50002, an error of Kafka."""
_KAFKA_ERROR: Final = 50002


WORDS: Final[dict[Fault, str]] = {
    Fault.CONSUMER: "Consumer instance not found.",
    Fault.NAME_TAKEN: "Consumer with specified consumer ID already exists in the specified consumer group.",
    Fault.EXCLUSIVE: (
        "IllegalStateError: You must choose only one way to configure your consumer: (1) subscribe to specific topics "
        "by name, (2) subscribe to topics matching a regex pattern, (3) assign itself specific topic-partitions."
    ),
}
"""Error texts that users' code looks for. They are Confluent's; `EXCLUSIVE` is Karapace's, which has the text of its
client library. Our own texts stay where they say more, such as a topic's name."""


def message(error: RestError) -> str:
    """Return the error text in this dialect."""
    return error.message if error.fault is None else WORDS.get(error.fault, error.message)


def number(error: RestError) -> tuple[int, int]:
    """Return status and error code. A body or parameter that violates its schema is a 422 here."""
    if error.fault is not None:
        return NUMBERS[error.fault]
    status = 422 if error.status == 400 and error.validation_errors else error.status
    return status, STATUS_NUMBERS.get(status, status)


class RecordResult(msgspec.Struct, frozen=True, gc=False):
    """The result of one record: partition and offset, or an error."""

    partition: int | None = None
    offset: int | None = None
    error_code: int | None = None
    error: str | None = None


class ProduceResults(msgspec.Struct, frozen=True):
    """The answer to a produce request; the schema ids are always null."""

    offsets: Sequence[RecordResult]
    key_schema_id: int | None = None
    value_schema_id: int | None = None


def produce_results(results: Sequence[Stored | ErrorBody]) -> ProduceResults:
    """Return the answer to a produce request: one entry for each record, in the order of the request."""
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
    """The body of a request to create a consumer; most values may also be strings."""

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
    """The settings of a consumer to create, and the default timeout of its polls."""

    create: CreateConsumer
    wait_ms: int


class PartitionTime(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The position of the first record that is not older than a time."""

    topic: str
    partition: int
    timestamp: str
    metadata: str | None = None


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Positions to seek to."""

    offsets: list[PartitionOffset] = []
    timestamps: list[PartitionTime] = []


class _Commit(msgspec.Struct, forbid_unknown_fields=True):
    offsets: list[PartitionOffset] | None = None


_CONSUMER: Final = msgspec.json.Decoder(ConsumerConfig)
_POSITIONS: Final = msgspec.json.Decoder(Positions, strict=False)
_COMMIT: Final = msgspec.json.Decoder(_Commit, strict=False)
_FORMATS: Final = frozenset(form.value for form in Format)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def decode_consumer(body: bytes) -> Consumer:
    """Decode a consumer's settings; all defaults for an empty body; RestError 422 for invalid settings."""
    config = decode(_CONSUMER, body) if body else ConsumerConfig()
    if config.format not in _FORMATS:
        raise RestError(422, f"Invalid format type: {config.format[:32]}", fault=Fault.CONSUMER_CONFIG)
    create: dict[str, Any] = {"name": config.name or config.id, "format": config.format}
    if config.auto_offset_reset is not None:
        create["auto_offset_reset"] = config.auto_offset_reset
    if config.auto_commit is not None:
        create["enable_auto_commit"] = config.auto_commit in (True, "true")
    if config.fetch_min_bytes is not None:  # -1: no minimum
        create["fetch_min_bytes"] = max(1, _integer(config.fetch_min_bytes, -1, "fetch.min.bytes"))
    if config.isolation_level is not None:
        create["isolation_level"] = config.isolation_level
    wait_ms = POLL_WAIT_MS
    if config.wait_ms is not None:
        wait_ms = _integer(config.wait_ms, 1, "consumer.request.timeout.ms")
    return Consumer(CreateConsumer(**create), wait_ms)


def _integer(value: str | int, least: int, name: str) -> int:
    number = int(value)
    if not least <= number <= LARGEST_INT:
        raise RestError(422, f"Invalid value {number} for configuration {name}", fault=Fault.CONSUMER_CONFIG)
    return number


def decode_positions(body: bytes) -> Positions:
    """Decode positions to seek to. RestError 400."""
    return decode(_POSITIONS, body)


def decode_commit(body: bytes) -> list[PartitionOffset] | None:
    """Decode the offsets to commit, which are one more than those of the last consumed records in the body.

    None, also for `{}`, means those of all delivered records.

    Raises:
        RestError: 400.
    """
    last = decode(_COMMIT, body).offsets if body else None
    return None if last is None else [msgspec.structs.replace(entry, offset=entry.offset + 1) for entry in last]


def epoch_ms(text: str) -> int:
    """Parse an ISO 8601 time with a zone to milliseconds since the epoch; RestError 422."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise unprocessable(f"{text[:40]!r} is not an ISO 8601 time") from error
    if moment.tzinfo is None:
        raise unprocessable(f"{text[:40]!r} has no time zone")
    since = (moment - _EPOCH) // timedelta(milliseconds=1)
    if since < 0:
        raise unprocessable(f"{text[:40]!r} is before 1970")
    return since


def poll_query(query: Mapping[str, int]) -> dict[str, int]:
    """Return the values of a poll's query without those that are -1, which means the default."""
    return {name: value for name, value in query.items() if value >= 0}
