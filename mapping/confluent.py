"""Maps records from and to the forms of Confluent's REST proxy. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from mapping.record import Headers, Received, Record
from mapping.rest.contents import compact_json, from_base64
from mapping.rest.incoming import merged_headers, standard_headers
from mapping.rest.outgoing import from_record
from protocols.rest.confluent_v3 import Data, DataReport, ProducedRecord, to_epoch
from protocols.rest.errors import unprocessable
from protocols.rest.media import Format
from protocols.rest.positions import LARGEST_PARTITION
from protocols.rest.requests import HeaderField
from protocols.rest.responses import RecordItem

_STRING: Final = msgspec.json.Decoder(str)
_NULL: Final = b"null"


def without_headers(record: Received, embedded: Format) -> RecordItem:
    """Map a stored record to an answer of version 2; UndecodableError as from `from_record`.

    The dialect has no headers. The timestamp is Karapace's addition; Confluent's clients ignore it.
    """
    return from_record(msgspec.structs.replace(record, headers=()), embedded)


class ReportData(NamedTuple):
    """Data for a record's report in addition to partition and offset."""

    key: DataReport | msgspec.UnsetType
    value: DataReport | msgspec.UnsetType
    timestamp: int


def to_record(
    produced: ProducedRecord, topic: str, principal: str, trace: Headers, now: int
) -> tuple[Record, ReportData]:
    """Map a record of version 3 to a record for Kafka and the data for its report.

    `now` (epoch ms) is the timestamp of a record without one.

    Raises:
        RestError: 400 or 422 if the record cannot be stored.
    """
    partition = produced.partition_id
    if partition is not None and not 0 <= partition <= LARGEST_PARTITION:
        raise unprocessable(f"The partition {partition} is out of range")
    timestamp = now if produced.timestamp is None else to_epoch(produced.timestamp)
    key, about_key, _ = _content(produced.key, "key")
    value, about_value, embedded = _content(produced.value, "value")
    standard = standard_headers(embedded, principal)
    fields = standard + trace
    if produced.headers:
        own = [HeaderField(header.name, header.value) for header in produced.headers]
        fields = merged_headers(own, standard, trace)
    return Record(topic, key, value, fields, timestamp, partition), ReportData(about_key, about_value, timestamp)


def _content(data: Data | None, part: str) -> tuple[bytes | None, DataReport | msgspec.UnsetType, Format]:
    """Return the bytes of a key or value, their report, and their format."""
    embedded = None if data is None else data.format(part)
    if data is None or embedded is None:
        return None, msgspec.UNSET, Format.BINARY
    raw = bytes(data.data)
    if raw == _NULL:
        content = None
    elif embedded is Format.JSON:
        content = compact_json(raw)
    else:
        try:
            text = _STRING.decode(raw)
        except msgspec.ValidationError as error:
            raise unprocessable(f"The {part} is of type {data.type}: it must be a string") from error
        content = text.encode() if embedded is Format.TEXT else from_base64(text)
    return content, DataReport((data.type or "").upper(), len(content or b"")), embedded
