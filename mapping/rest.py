"""Records of HTTP bodies to Kafka records and back, in the three embedded formats. Pure.

Keys: a JSON string is stored as its bare text, so that `kitchen/temp` is the same key whether it came by MQTT, AMQP or
HTTP. What is read as JSON again is an object, an array or a quoted string; any other key is text.
"""

from __future__ import annotations

import binascii
import functools
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from mapping.record import (
    CONTENT_TYPE,
    GW_CLIENT,
    GW_PROTOCOL,
    TRACEPARENT,
    TRACESTATE,
    Header,
    Headers,
    Received,
    Record,
    raw_name,
)
from protocols.rest.cloud_events import CloudEvent
from protocols.rest.errors import RestError, invalid, unprocessable
from protocols.rest.media import Format
from protocols.rest.requests import (
    HeaderField,
    JsonRecord,
    Placing,
    decode_json,
    decode_line,
    decode_lines,
    decode_text,
    whole,
)
from protocols.rest.responses import RecordHeader, RecordItem, encode

PROTOCOL: Final = b"http"
CONTENT_TYPES: Final = {
    Format.JSON: b"application/json",
    Format.BINARY: b"application/octet-stream",
    Format.TEXT: b"text/plain",
}
LARGEST_PARTITION: Final = 2**31 - 1
LARGEST_TIMESTAMP: Final = 2**63 - 1

_QUOTE: Final = 0x22
_ESCAPE: Final = 0x5C
_RAW: Final = msgspec.json.Decoder(msgspec.Raw)
_STRING: Final = msgspec.json.Decoder(str)
_STRING_OR_NULL: Final = msgspec.json.Decoder(str | None)
_WHITESPACE: Final = (b" ", b"\r", b"\t", b"\n")  # the last stands between lines, not in values


class UndecodableError(Exception):
    """A stored key or value does not fit the format that the client asked for."""

    def __init__(self, record: Received, part: str, wanted: str) -> None:
        super().__init__(
            f"Failed to decode: the {part} of the record at offset {record.offset} of {record.topic},"
            f" partition {record.partition}, is not {wanted}"
        )


@functools.lru_cache(maxsize=4096)
def standard_headers(embedded: Format, principal: str) -> Headers:
    """The headers that every record of a client gets; kept for the principals that were seen last."""
    return (
        (CONTENT_TYPE, CONTENT_TYPES[embedded]),
        (GW_PROTOCOL, PROTOCOL),
        (GW_CLIENT, principal.encode()),
    )


def trace_headers(traceparent: str | None, tracestate: str | None) -> Headers:
    """The trace context of a request (W3C Trace Context); the state means nothing without its parent."""
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
    headers: Headers,
    trace: Headers = (),
) -> list[Record]:
    """The records of a produce request's body, at most `limit`.

    `embedded` says how keys and values stand in it; the headers are of `standard_headers` and `trace_headers`.

    Raises:
        RestError: the request as a whole is refused; nothing of it was stored.
    """
    target = _Target(topic, partition, headers, trace)
    if embedded is Format.JSON:
        return _json_records(decode_json(body, limit), body, target)
    texts = decode_text(body, limit, embedded)
    convert = from_base64 if embedded is Format.BINARY else _from_text
    keys = [convert(entry.key) for entry in texts]
    values = [convert(entry.value) for entry in texts]
    return _placed(texts, keys, values, target)


def from_lines(lines: bytes, topic: str, headers: Headers, trace: Headers = ()) -> list[Record | RestError]:
    """The records of whole lines, each one in the json format.

    What is none is an error in its place, a blank line is nothing. The headers are of `standard_headers` and
    `trace_headers`.
    """
    target = _Target(topic, None, headers, trace)
    try:
        return list(_json_records(decode_lines(lines), lines, target, lines=True))
    except RestError:
        pass  # one of them: see which
    found: list[Record | RestError] = []
    for line in lines.split(b"\n"):
        if line.strip():
            try:
                found += _json_records([decode_line(line)], line, target)
            except RestError as error:
                found.append(error)
    return found


class _Target(msgspec.Struct, frozen=True, gc=False):
    """Where records of a request go, and what each of them gets; see `to_records`."""

    topic: str
    partition: int | None
    headers: Headers
    trace: Headers


def _json_records(entries: Sequence[JsonRecord], text: bytes, target: _Target, *, lines: bool = False) -> list[Record]:
    """`text`: where the entries stood, one on each line or not."""
    keys = [_json_key(bytes(entry.key)) for entry in entries]
    values: list[bytes | None]
    spaces = _WHITESPACE[:3] if lines else _WHITESPACE
    if any(space in text for space in spaces):  # somewhere, perhaps inside a string only
        values = [compact_json(entry.value) for entry in entries]
    else:
        values = [bytes(entry.value) for entry in entries]
    if b"null" in values:
        values = [None if value == b"null" else value for value in values]  # null is a tombstone
    records = _placed(entries, keys, values, target)
    if b'_format"' in text or b"\\" in text:  # perhaps as a name
        for index, entry in enumerate(entries):
            if entry.key_format is not None or entry.value_format is not None:
                records[index] = _formatted(records[index], entry, target)
    return records


def _formatted(record: Record, entry: JsonRecord, target: _Target) -> Record:
    """The record anew, with the formats that it names itself."""
    key, value = record.key, record.value
    if entry.key_format not in (None, Format.JSON):
        key = _from_string(entry.key, entry.key_format, "key")
    embedded = entry.value_format
    if embedded is not None:
        if embedded is not Format.JSON:
            value = _from_string(entry.value, embedded, "value")
        others = tuple(one for one in target.headers if one[0] != CONTENT_TYPE)
        headers = ((CONTENT_TYPE, CONTENT_TYPES[embedded]), *others)
        target = _Target(target.topic, target.partition, headers, target.trace)
    return _placed([entry], [key], [value], target)[0]


def _from_string(raw: msgspec.Raw, embedded: Format | None, part: str) -> bytes | None:
    """A JSON string, or null, in the text or binary format."""
    try:
        text = _STRING_OR_NULL.decode(raw)
    except msgspec.ValidationError as error:
        raise unprocessable(f"Because the {part}_format is not 'json', the {part} must be a string") from error
    return from_base64(text) if embedded is Format.BINARY else _from_text(text)


def _placed(
    entries: Sequence[Placing], keys: Sequence[bytes | None], values: Sequence[bytes | None], target: _Target
) -> list[Record]:
    """Records of what stands beside keys and values."""
    topic, partition, headers, trace = target.topic, target.partition, target.headers, target.trace
    plain = headers + trace
    if not [1 for one in entries if one.partition is not msgspec.UNSET or one.timestamp is not None or one.headers]:
        return [Record(topic, key, value, plain, None, partition) for key, value in zip(keys, values, strict=True)]
    records: list[Record] = []
    for entry, key, value in zip(entries, keys, values, strict=True):
        wanted = entry.partition
        place = partition if wanted is msgspec.UNSET else _checked_partition(wanted, partition, len(records))
        timestamp = None if entry.timestamp is None else whole(entry.timestamp, f"$.records[{len(records)}].timestamp")
        if timestamp is not None and not 0 <= timestamp <= LARGEST_TIMESTAMP:
            raise unprocessable(f"The timestamp {timestamp} is out of range")
        fields = merged_headers(entry.headers, headers, trace) if entry.headers else plain
        records.append(Record(topic, key, value, fields, timestamp, place))
    return records


def _checked_partition(given: float | None, path_partition: int | None, index: int) -> int | None:
    if path_partition is not None:
        raise invalid(f"Object contains unknown field `partition` - at `$.records[{index}]`")
    if given is None:
        return None
    partition = whole(given, f"$.records[{index}].partition")
    if not 0 <= partition <= LARGEST_PARTITION:
        raise unprocessable(f"The partition {partition} is out of range")
    return partition


def merged_headers(fields: Sequence[HeaderField], standard: Headers, trace: Headers) -> Headers:
    """The client's headers in their order, then ours; its own content type and trace context stand."""
    own: list[Header] = [(raw_name(field.key), from_base64(field.value)) for field in fields]
    names = {name for name, _ in own}
    own += [header for header in standard if header[0] not in names]
    if TRACEPARENT not in names:
        own += [header for header in trace if header[0] not in names]
    return tuple(own)


def _json_key(text: bytes) -> bytes | None:
    if text[0] == _QUOTE:
        return text[1:-1] if _ESCAPE not in text else _STRING.decode(text).encode()
    return None if text == b"null" else compact_json(text)


def compact_json(raw: msgspec.Raw | bytes) -> bytes:
    """The same JSON text without insignificant space; every digit and every repeated name stays."""
    return msgspec.json.format(bytes(raw), indent=-1)


def _from_text(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def from_base64(text: str | None) -> bytes | None:
    """RFC 4648 section 4; the padding may be missing, nothing else. RestError 422."""
    if text is None:
        return None
    padded = text
    if len(text) % 4 or text.endswith("="):
        bare = text.rstrip("=")
        missing = -len(bare) % 4
        if len(text) - len(bare) > missing:  # binascii does not mind
            raise unprocessable(f"{text[:32]!r} is not base64: too much padding")
        padded = bare + "=" * missing
    try:
        return binascii.a2b_base64(padded, strict_mode=True)
    except ValueError as error:
        raise unprocessable(f"{text[:32]!r} is not base64: {error}") from error


def from_record(record: Received, embedded: Format) -> RecordItem:
    """A stored record as it stands in an answer.

    Raises:
        UndecodableError: the key or value cannot be said in this format; in binary everything can.
    """
    key, value = record.key, record.value
    shown_key: msgspec.Raw | str | bytes | None = key
    shown_value: msgspec.Raw | str | bytes | None = value
    if embedded is not Format.BINARY:
        if key is not None:
            shown_key = _shown_key(record, key) if embedded is Format.JSON else _shown_text(record, key, "key")
        if value is not None:
            shown_value = _shown_json(record, value) if embedded is Format.JSON else _shown_text(record, value, "value")
    return RecordItem(
        record.topic,
        shown_key,
        shown_value,
        record.partition,
        record.offset,
        record.timestamp,
        tuple([RecordHeader(name, content) for name, content in record.headers]) if record.headers else msgspec.UNSET,
    )


def _shown_text(record: Received, content: bytes, part: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UndecodableError(record, part, "UTF-8 text") from error


def _shown_json(record: Received, content: bytes) -> msgspec.Raw:
    try:
        if not content.isascii():
            content.decode()
        return _RAW.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableError(record, "value", "JSON") from error


def _shown_key(record: Received, content: bytes) -> msgspec.Raw | str:
    if content.startswith((b"{", b"[", b'"')):
        try:
            content.decode()
            return _RAW.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _shown_text(record, content, "key")
    return _shown_text(record, content, "key")


class MarkedItem(RecordItem, frozen=True, gc=False):
    """A record of which a part is in another format than the others."""

    key_format: str | msgspec.UnsetType = msgspec.UNSET
    value_format: str | msgspec.UnsetType = msgspec.UNSET


class RecordFilter:
    """Which records of a topic a reader wants; it sees nothing of the others."""

    __slots__ = ("_headers", "_keys", "everything")

    def __init__(self, keys: Collection[str] = (), headers: Sequence[str] = ()) -> None:
        """Compile: a key is one of `keys`, as UTF-8 (none: any key, or no key).

        A record has all `headers`, each `NAME:VALUE`.

        Raises:
            RestError: 422 for a header without a colon.
        """
        self._keys = frozenset(key.encode("utf-8", "surrogateescape") for key in keys)
        self._headers = tuple(_header(text) for text in headers)
        self.everything = not self._keys and not self._headers

    def matches(self, record: Received) -> bool:
        """Whether the record is wanted."""
        if self._keys and record.key not in self._keys:
            return False
        return all(header in record.headers for header in self._headers)


def view(record: Received, embedded: Format) -> RecordItem:
    """A stored record as it stands in an answer; what the format cannot say is marked."""
    try:
        return from_record(record, embedded)
    except UndecodableError:
        plain = from_record(record, Format.BINARY)
    key = _part(record, embedded, "key")
    value = _part(record, embedded, "value")
    return MarkedItem(
        plain.topic,
        plain.key if key is None else key.key,
        plain.value if value is None else value.value,
        plain.partition,
        plain.offset,
        plain.timestamp,
        plain.headers,
        Format.BINARY.value if key is None else msgspec.UNSET,
        Format.BINARY.value if value is None else msgspec.UNSET,
    )


def view_line(record: Received, embedded: Format) -> bytes:
    """The same as one line of JSON: stored JSON may have line feeds, which mean nothing between its tokens."""
    line = encode(view(record, embedded))
    if b"\n" in line or b"\r" in line:
        line = line.replace(b"\n", b" ").replace(b"\r", b" ")
    return line


def _part(record: Received, embedded: Format, name: str) -> RecordItem | None:
    """The record with its key or its value alone; None when that cannot be said."""
    key, value = (record.key, None) if name == "key" else (None, record.value)
    alone = Received(record.topic, key, value, (), record.timestamp, record.partition, record.offset)
    try:
        return from_record(alone, embedded)
    except UndecodableError:
        return None


def _header(text: str) -> tuple[str, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name:
        raise unprocessable("A header is wanted as NAME:VALUE - at `header`")
    return name, value.encode("utf-8", "surrogateescape")


ATTRIBUTE_PREFIX: Final = "ce_"
KEY: Final = "partitionkey"  # the partitioning extension


def event_record(event: CloudEvent, topic: str, standard: Headers, trace: Headers) -> Record:
    """A valid event in the binary mode of CloudEvents' Kafka Protocol Binding (section 3.2).

    `standard` is what each record gets, without a content type.
    """
    headers: list[Header] = [(ATTRIBUTE_PREFIX + name, value.encode()) for name, value in event.attributes.items()]
    if event.content_type is not None:
        headers.append((CONTENT_TYPE, event.content_type.encode("utf-8", "surrogateescape")))
    key = event.attributes.get(KEY)
    return Record(topic, None if key is None else key.encode(), event.data, (*headers, *standard, *trace))
