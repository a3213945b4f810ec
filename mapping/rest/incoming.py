"""Maps bodies of HTTP produce requests to Kafka records, in the three embedded formats. Pure.

`Target` maps any record. A body in which all records have only a key and a value, as in nearly all, is decoded by
msgspec to what is stored (ADR 0088).

A key that is a JSON string is stored as its bare text, so that `kitchen/temp` is the same key over MQTT, AMQP and HTTP.
A stored key is shown as JSON if it is an object, an array or a quoted string; any other key is shown as text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from mapping.record import (
    CONTENT_TYPE,
    GW_CLIENT,
    GW_PROTOCOL,
    LAST_MILLISECOND,
    TRACEPARENT,
    TRACESTATE,
    Header,
    Headers,
    Record,
    raw_name,
)
from mapping.rest.contents import compact_json, from_base64, from_text, json_key, json_value
from protocols.rest.errors import RestError, invalid, unprocessable
from protocols.rest.media import Format
from protocols.rest.positions import LARGEST_PARTITION
from protocols.rest.requests import (
    LINE,
    PLAIN_BINARY,
    PLAIN_JSON,
    PLAIN_LINE,
    PLAIN_TEXT,
    HeaderField,
    JsonRecord,
    PlainJson,
    RecordFields,
    TextRecord,
    decode_json,
    decode_line,
    decode_lines,
    decode_plain,
    decode_text,
    integer,
    spaces,
)
from protocols.rest.responses import ErrorBody, error_body

PROTOCOL: Final = b"http"
CONTENT_TYPES: Final = {
    Format.JSON: b"application/json",
    Format.BINARY: b"application/octet-stream",
    Format.TEXT: b"text/plain",
}

RUN: Final = 64
"""Lines of an upload that are decoded one by one before others may work."""

_NULL: Final = b"null"
_STRING_OR_NULL: Final = msgspec.json.Decoder(str | None)


@functools.lru_cache(maxsize=4096)
def standard_headers(embedded: Format, principal: str) -> Headers:
    """Return the headers that every record of a client gets; cached by principal."""
    return (
        (CONTENT_TYPE, CONTENT_TYPES[embedded]),
        (GW_PROTOCOL, PROTOCOL),
        (GW_CLIENT, principal.encode()),
    )


def trace_headers(traceparent: str | None, tracestate: str | None) -> Headers:
    """Return the trace context of a request as headers (W3C Trace Context); none without `traceparent`."""
    if traceparent is None:
        return ()
    parent: Header = (TRACEPARENT, traceparent.encode("utf-8", "surrogateescape"))
    if tracestate is None:
        return (parent,)
    return (parent, (TRACESTATE, tracestate.encode("utf-8", "surrogateescape")))


def to_records(
    body: bytes,
    embedded: Format,
    *,
    topic: str,
    partition: int | None,
    limit: int,
    principal: str,
    trace: Headers = (),
) -> list[Record]:
    """Decode at most `limit` records from a produce request's body.

    `embedded` is the format of keys and values, `principal` the client's; `trace` is from `trace_headers`.

    Raises:
        RestError: The whole request is refused.
    """
    target = Target(topic, partition, standard_headers(embedded, principal), trace, embedded)
    plain = target.plain_records(body, limit)
    return target.any_records(body, limit) if plain is None else plain


def from_lines(lines: bytes, topic: str, principal: str, trace: Headers = ()) -> Iterator[Sequence[Record | ErrorBody]]:
    """Decode complete lines, each a record in the json format; yield their results in runs.

    A line that is not valid gives an error in its place; a blank line gives nothing. With such lines the runs have at
    most `RUN` lines, so that others can work in between. `principal` is the client's, `trace` is from `trace_headers`.
    """
    target = Target(topic, None, standard_headers(Format.JSON, principal), trace, Format.JSON)
    plain = decode_lines(PLAIN_LINE, lines)
    if plain is not None:
        compact = spaces(lines) == lines.count(b"\n")
        yield target.plain_json(plain, bytes if compact else compact_json)
        return
    decoded = decode_lines(LINE, lines)
    entries: Sequence[JsonRecord | bytes]  # not decoded if one of them is not valid
    entries = [line for line in lines.split(b"\n") if line.strip()] if decoded is None else decoded
    for start in range(0, len(entries), RUN):
        yield [_from_line(target, entry) for entry in entries[start : start + RUN]]


def _from_line(target: Target, line: JsonRecord | bytes) -> Record | ErrorBody:
    try:
        return target.json_record(0, decode_line(line) if isinstance(line, bytes) else line)
    except RestError as error:
        return error_body(error)


class Target(msgspec.Struct, frozen=True, gc=False):
    """Destination, headers and format of a request's records; see `to_records`."""

    topic: str
    partition: int | None
    headers: Headers
    trace: Headers
    embedded: Format

    def plain_records(self, body: bytes, limit: int) -> list[Record] | None:
        """Return the records of a body if all are plain, else None; RestError as `decode_plain`."""
        if self.embedded is Format.JSON:
            values = decode_plain(PLAIN_JSON, body, limit)
            return None if values is None else self.plain_json(values)
        topic, headers, partition = self.topic, self.headers + self.trace, self.partition
        if self.embedded is Format.BINARY:
            contents = decode_plain(PLAIN_BINARY, body, limit)
            if contents is None:
                return None
            return [Record(topic, item.key, item.value, headers, None, partition) for item in contents]
        texts = decode_plain(PLAIN_TEXT, body, limit)
        if texts is None:
            return None
        return [Record(topic, from_text(item.key), from_text(item.value), headers, None, partition) for item in texts]

    def any_records(self, body: bytes, limit: int) -> list[Record]:
        """Return the records of any body; RestError."""
        if self.embedded is Format.JSON:
            return list(itertools.starmap(self.json_record, enumerate(decode_json(body, limit))))
        return list(itertools.starmap(self.text_record, enumerate(decode_text(body, limit, self.embedded))))

    def plain_json(self, entries: list[PlainJson], content: Callable[[msgspec.Raw], bytes] = bytes) -> list[Record]:
        """Map plain records in the json format; `content` returns a value's compact text."""
        topic, headers, partition = self.topic, self.headers + self.trace, self.partition
        made = []
        for entry in entries:
            key, value = entry.key, content(entry.value)
            stored = None if value == _NULL else value
            made.append(Record(topic, None if key is None else key.encode(), stored, headers, None, partition))
        return made

    def json_record(self, index: int, entry: JsonRecord) -> Record:
        """Map an entry in the json format; RestError."""
        raw_key, raw_value, headers = bytes(entry.key), bytes(entry.value), self.headers
        named = entry.key_format in (None, Format.JSON)
        key = json_key(raw_key) if named else _from_string(raw_key, entry.key_format, "key")
        embedded = entry.value_format
        value = json_value(raw_value) if embedded in (None, Format.JSON) else _from_string(raw_value, embedded, "value")
        if embedded is not None:
            others = tuple(item for item in headers if item[0] != CONTENT_TYPE)
            headers = ((CONTENT_TYPE, CONTENT_TYPES[embedded]), *others)
        return self._record(index, entry, key, value, headers)

    def text_record(self, index: int, entry: TextRecord) -> Record:
        """Map an entry in the text or binary format; RestError."""
        content = from_base64 if self.embedded is Format.BINARY else from_text
        return self._record(index, entry, content(entry.key), content(entry.value), self.headers)

    def _record(
        self, index: int, entry: RecordFields, key: bytes | None, value: bytes | None, standard: Headers
    ) -> Record:
        """Make a record with the entry's partition, timestamp and headers."""
        wanted, partition = entry.partition, self.partition
        if wanted is not msgspec.UNSET:
            partition = _checked_partition(wanted, partition, index)
        timestamp = None if entry.timestamp is None else integer(entry.timestamp, f"$.records[{index}].timestamp")
        if timestamp is not None and not 0 <= timestamp <= LAST_MILLISECOND:
            raise unprocessable(f"The timestamp {timestamp} is not in milliseconds since 1970, up to the year 9999")
        trace = self.trace
        headers = merged_headers(entry.headers, standard, trace) if entry.headers else standard + trace
        return Record(self.topic, key, value, headers, timestamp, partition)


def _from_string(raw: bytes, embedded: Format | None, part: str) -> bytes | None:
    """Decode a JSON string or null that is in the text or binary format."""
    try:
        text = _STRING_OR_NULL.decode(raw)
    except msgspec.ValidationError as error:
        raise unprocessable(f"Because the {part}_format is not 'json', the {part} must be a string") from error
    return from_base64(text) if embedded is Format.BINARY else from_text(text)


def _checked_partition(given: float | None, path_partition: int | None, index: int) -> int | None:
    if path_partition is not None:
        raise invalid(f"Object contains unknown field `partition` - at `$.records[{index}]`")
    if given is None:
        return None
    partition = integer(given, f"$.records[{index}].partition")
    if not 0 <= partition <= LARGEST_PARTITION:
        raise unprocessable(f"The partition {partition} is out of range")
    return partition


def merged_headers(fields: Sequence[HeaderField], standard: Headers, trace: Headers) -> Headers:
    """Return the client's headers in order, then ours; its own content type and trace context take precedence."""
    own: list[Header] = [(raw_name(field.key), from_base64(field.value)) for field in fields]
    names = {name for name, _ in own}
    own += [header for header in standard if header[0] not in names]
    if TRACEPARENT not in names:
        own += [header for header in trace if header[0] not in names]
    return tuple(own)
