"""Bodies of Confluent's REST API version 3: records to produce, reports about them, clusters and topics."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from protocols.rest.confluent import NO_REGISTRY
from protocols.rest.errors import Fault, RestError, unprocessable
from protocols.rest.media import Format
from protocols.rest.requests import NULL, check_utf8, decode

TYPES: Final = {"BINARY": Format.BINARY, "JSON": Format.JSON, "STRING": Format.TEXT}
SCHEMA_TYPES: Final = frozenset({"AVRO", "JSONSCHEMA", "PROTOBUF"})
LONGEST_ID: Final = 80  # characters of an entry's id
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Header(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A header of a record: its value in base64, or null."""

    name: str
    value: str | None = None


class Data(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A key or value with its type."""

    type: str | None = None
    data: msgspec.Raw = NULL
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    schema_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    schema_version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    subject: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    subject_name_strategy: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def format(self, part: str) -> Format | None:
        """Return the format of `data`, None if there is no data. `part` is `key` or `value`, for error texts.

        Raises:
            RestError: 422 if it needs a schema, 400 for an unknown or missing type.
        """
        kind = None if self.type is None else self.type.upper()
        embedded = TYPES.get(kind or "")
        if kind in SCHEMA_TYPES or (self != Data(self.type, self.data) and self._has_schema()):
            raise RestError(422, NO_REGISTRY, fault=Fault.SCHEMA)
        if kind is None and self.data == NULL:
            return None
        if embedded is None:
            raise RestError(400, f"The {part} has the type {(kind or 'null')[:32]}; {', '.join(TYPES)} are supported")
        return embedded

    def _has_schema(self) -> bool:
        schemas = (self.schema, self.schema_id, self.schema_version, self.subject, self.subject_name_strategy)
        return any(schema is not msgspec.UNSET and schema != NULL for schema in schemas)


class ProducedRecord(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One record to produce."""

    partition_id: int | None = None
    headers: tuple[Header, ...] = ()
    key: Data | None = None
    value: Data | None = None
    timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class BatchEntry(ProducedRecord, frozen=True, gc=False, forbid_unknown_fields=True, kw_only=True):
    """One record of a batch; the client chooses its id."""

    id: str


class _Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entries: list[msgspec.Raw]


class _Name(msgspec.Struct, frozen=True, gc=False):
    id: str


class DataReport(msgspec.Struct, frozen=True, gc=False):
    """The type of a stored key or value, and its size in bytes."""

    type: str
    size: int


class Report(msgspec.Struct, frozen=True, gc=False):
    """A record that every in-sync replica has."""

    error_code: int
    cluster_id: str
    topic_name: str
    partition_id: int
    offset: int
    timestamp: datetime
    key: DataReport | msgspec.UnsetType = msgspec.UNSET
    value: DataReport | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET


class ErrorReport(msgspec.Struct, frozen=True, gc=False):
    """A record that was not stored."""

    error_code: int
    message: str
    id: str | msgspec.UnsetType = msgspec.UNSET


_PRODUCED: Final = msgspec.json.Decoder(ProducedRecord)
_ENTRY: Final = msgspec.json.Decoder(BatchEntry)
_NAME: Final = msgspec.json.Decoder(_Name)
_BATCH: Final = msgspec.json.Decoder(_Batch)


def decode_produced(document: bytes) -> ProducedRecord:
    """Decode one record; RestError 400 with the place in `validation_errors`."""
    check_utf8(document)
    return decode(_PRODUCED, document)


def decode_entry(document: msgspec.Raw) -> ProducedRecord:
    """Decode one record of a batch; RestError 400."""
    return decode(_ENTRY, bytes(document))


def decode_batch(body: bytes, limit: int) -> list[tuple[str, msgspec.Raw]]:
    """Return the ids and the undecoded entries of a batch.

    Raises:
        RestError: 400; 422 for no entries, more than `limit`, or ids that are empty, too long or duplicate.
    """
    check_utf8(body)
    entries = decode(_BATCH, body).entries
    if not 1 <= len(entries) <= limit:
        raise _bad_batch(f"it has {len(entries)} entries; 1 to {limit} are allowed")
    names = [decode(_NAME, bytes(entry)).id for entry in entries]
    if any(not 1 <= len(name) <= LONGEST_ID for name in names):
        raise _bad_batch(f"an id must have 1 to {LONGEST_ID} characters")
    if len(set(names)) < len(names):
        raise _bad_batch("an id is not unique")
    return list(zip(names, entries, strict=True))


def to_epoch(moment: datetime) -> int:
    """Return milliseconds since the epoch; RestError 422 for an earlier time."""
    milliseconds = (moment - _EPOCH) // _MILLISECOND
    if milliseconds < 0:
        raise unprocessable(f"The timestamp {moment.isoformat()} is before 1970")
    return milliseconds


def from_epoch(milliseconds: int) -> datetime:
    """Return the time for milliseconds since the epoch."""
    return _EPOCH + milliseconds * _MILLISECOND


def error_message(error: RestError) -> str:
    """Return the message of a record's error, with the five-digit code in it as in Confluent's reports."""
    if error.fault is Fault.SCHEMA:
        return f"Error: 42206 : {error.message}"
    return ": ".join((error.message, *error.validation_errors))


def resource_list(kind: str, address: str, entries: Sequence[Any]) -> dict[str, Any]:
    """Return a list in the API's form; it never has further pages."""
    return {"kind": kind, "metadata": {"self": address, "next": None}, "data": entries}


def cluster_view(cluster_id: str, address: str) -> dict[str, Any]:
    """Return a cluster; `address` is its URL."""
    return {
        "kind": "KafkaCluster",
        "metadata": {"self": address, "resource_name": f"crn:///kafka={cluster_id}"},
        "cluster_id": cluster_id,
        "topics": {"related": f"{address}/topics"},
    }


def topic_view(cluster_id: str, topic: str, address: str, partitions: int, replicas: int) -> dict[str, Any]:
    """Return a topic; `address` is its URL."""
    return {
        "kind": "KafkaTopic",
        "metadata": {"self": address, "resource_name": f"crn:///kafka={cluster_id}/topic={topic}"},
        "cluster_id": cluster_id,
        "topic_name": topic,
        "is_internal": False,
        "replication_factor": replicas,
        "partitions_count": partitions,
    }


def _bad_batch(why: str) -> RestError:
    return RestError(422, f"The batch cannot be used: {why}", fault=Fault.BATCH)
