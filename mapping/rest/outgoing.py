"""Maps stored records to HTTP answers in the three embedded formats, and filters records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from mapping.record import Received
from protocols.rest.errors import unprocessable
from protocols.rest.media import Format
from protocols.rest.responses import RecordHeader, RecordItem, encode

_RAW: Final = msgspec.json.Decoder(msgspec.Raw)


class UndecodableError(Exception):
    """A stored key or value cannot be represented in the format that the client requested."""

    def __init__(self, record: Received, part: str, wanted: str) -> None:
        super().__init__(
            f"Failed to decode: the {part} of the record at offset {record.offset} of {record.topic},"
            f" partition {record.partition}, is not {wanted}"
        )


def from_record(record: Received, embedded: Format) -> RecordItem:
    """Map a stored record to its form in an answer.

    Raises:
        UndecodableError: The format cannot represent the key or value; the binary format always can.
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
    """A record whose key or value is in another format than requested."""

    key_format: str | msgspec.UnsetType = msgspec.UNSET
    value_format: str | msgspec.UnsetType = msgspec.UNSET


class RecordFilter:
    """Selects the records of a topic that a reader gets."""

    __slots__ = ("_headers", "_keys", "everything")

    def __init__(self, keys: Collection[str] = (), headers: Sequence[str] = ()) -> None:
        """Select records whose key is one of `keys` (none: all records), and that have all `headers` (`NAME:VALUE`).

        Raises:
            RestError: 422 for a header without a colon.
        """
        self._keys = frozenset(key.encode("utf-8", "surrogateescape") for key in keys)
        self._headers = tuple(_header(text) for text in headers)
        self.everything = not self._keys and not self._headers

    def matches(self, record: Received) -> bool:
        """Whether the filter selects the record."""
        if self._keys and record.key not in self._keys:
            return False
        return all(header in record.headers for header in self._headers)


def view(record: Received, embedded: Format) -> RecordItem:
    """Map a stored record to its form in an answer; a part that the format cannot represent is marked and binary."""
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
    """Like `view`, as one line of JSON. Line feeds in stored JSON are between tokens and can be replaced."""
    line = encode(view(record, embedded))
    if b"\n" in line or b"\r" in line:
        line = line.replace(b"\n", b" ").replace(b"\r", b" ")
    return line


def _part(record: Received, embedded: Format, name: str) -> RecordItem | None:
    """Return the record with only its key or value; None if the format cannot represent it."""
    key, value = (record.key, None) if name == "key" else (None, record.value)
    alone = Received(record.topic, key, value, (), record.timestamp, record.partition, record.offset)
    try:
        return from_record(alone, embedded)
    except UndecodableError:
        return None


def _header(text: str) -> tuple[str, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name:
        raise unprocessable("A header must be NAME:VALUE - at `header`")
    return name, value.encode("utf-8", "surrogateescape")
