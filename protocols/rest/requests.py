"""Decodes bodies of produce requests: strict, typed, in one pass over the bytes.

JSON values are kept as the sender's own text (`msgspec.Raw`), so that no number loses a digit and no object its order.
Well-formed values that cannot be used (bad base64, a negative partition) are refused in `mapping.rest`, where keys and
values become bytes.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

import msgspec

from protocols.rest.errors import RestError, invalid, unprocessable
from protocols.rest.media import Format

NULL: Final = msgspec.Raw(b"null")
_PATH: Final = " - at `"
Body = TypeVar("Body")
Entry = TypeVar("Entry")
Key = TypeVar("Key")
Value = TypeVar("Value")


class HeaderField(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One record header: its value in base64, or null for Kafka's null."""

    key: str
    value: str | None


class RecordFields(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """The fields of a record in every format. `timestamp` is in milliseconds since the epoch."""

    partition: int | float | msgspec.UnsetType | None = (
        msgspec.UNSET
    )  # 1.0 and 1e0 are integers to JSON Schema (2020-12, section 6.1.1)
    timestamp: int | float | None = None
    headers: tuple[HeaderField, ...] = ()


class JsonRecord(RecordFields, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """A record whose key and value are JSON texts, or JSON strings in another format that the record names."""

    value: msgspec.Raw
    key: msgspec.Raw = NULL
    key_format: Format | None = None
    value_format: Format | None = None


class TextRecord(RecordFields, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """A record whose key and value are text, or base64 text."""

    value: str | None
    key: str | None = None


class PlainRecord(msgspec.Struct, Generic[Key, Value], frozen=True, gc=False, forbid_unknown_fields=True):
    """A record with only a key and a value, as nearly all are. msgspec decodes these."""

    value: Value
    key: Key | None = None


PlainJson = PlainRecord[str, msgspec.Raw]
PlainText = PlainRecord[str, str | None]
PlainBinary = PlainRecord[bytes, bytes | None]


class _Body(msgspec.Struct, Generic[Entry], gc=False, forbid_unknown_fields=True):
    records: list[Entry] | msgspec.UnsetType = msgspec.UNSET


def integer(number: float, where: str) -> int:
    """Return an integer that may be written as `1.0`; RestError 400 for a fraction."""
    if isinstance(number, int):
        return number
    if number.is_integer():
        return int(number)
    raise invalid(f"Expected `int | null`, got `float` - at `{where}`")


_JSON: Final = msgspec.json.Decoder(_Body[JsonRecord])
_TEXT: Final = msgspec.json.Decoder(_Body[TextRecord])
LINE: Final = msgspec.json.Decoder(JsonRecord)
PLAIN_LINE: Final = msgspec.json.Decoder(PlainJson)
PLAIN_JSON: Final = msgspec.json.Decoder(_Body[PlainJson])
PLAIN_TEXT: Final = msgspec.json.Decoder(_Body[PlainText])
PLAIN_BINARY: Final = msgspec.json.Decoder(_Body[PlainBinary])
_HALF_PAIR: Final = re.compile(  # such as \ud800 alone, for which the decoder has other words each time
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
_UNDECODABLE: Final = (RestError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_plain(decoder: msgspec.json.Decoder[_Body[Entry]], body: bytes, limit: int) -> list[Entry] | None:
    """Decode a body whose records are all plain, with `PLAIN_JSON`, `PLAIN_TEXT` or `PLAIN_BINARY`.

    JSON values are without insignificant space. None means any other body, also one that is not valid.

    Raises:
        RestError: 413 or 422, as `decode_json`.
    """
    try:
        check_utf8(body)
        records = decoder.decode(msgspec.json.format(body, indent=-1) if spaces(body) else body).records
    except _UNDECODABLE:
        return None
    return _checked(records, limit)


def decode_lines(decoder: msgspec.json.Decoder[Entry], lines: bytes) -> list[Entry] | None:
    """Decode complete lines, each a record in the json format, with `LINE`, or with `PLAIN_LINE` if all are plain.

    None means that a line is blank or not such a record.
    """
    try:
        check_utf8(lines)
        records = decoder.decode_lines(lines)
    except _UNDECODABLE:
        return None
    return records if len(records) == lines.count(b"\n") + (not lines.endswith(b"\n")) else None


def decode_json(body: bytes, limit: int) -> list[JsonRecord]:
    """Decode the records of a body in the json format.

    Raises:
        RestError: 400 if the body violates the contract, 413 for more than `limit` records, 422 for a body without
            records.
    """
    check_utf8(body)  # msgspec.Raw checks the grammar, not the encoding
    return _checked(decode(_JSON, body).records, limit)


def decode_line(line: bytes) -> JsonRecord:
    """Decode one record in the json format; RestError 400 with the place in `validation_errors`."""
    check_utf8(line)
    return decode(LINE, line)


def decode_text(body: bytes, limit: int, embedded: Format) -> list[TextRecord]:
    """Decode a body in the text or binary format; errors as `decode_json`, and 422 if a value is not a string."""
    try:
        records = decode(_TEXT, body).records
    except RestError as error:
        name = _bad_field(error)
        if name is None:
            raise
        raise unprocessable(
            f"Because the embedded format is '{embedded.value}', the {name} must be a string"
        ) from error
    return _checked(records, limit)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Decode JSON; RestError 400 with the place in `validation_errors`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error).replace("int | float", "number")) from error
    except msgspec.DecodeError as error:
        reason = "a string has half of a surrogate pair" if _HALF_PAIR.search(body) else str(error)
        raise RestError(400, f"Validation error on: the body is not JSON: {reason}") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from error
    except RecursionError as error:
        raise RestError(400, "Validation error on: the body is nested too deeply") from error


def spaces(text: bytes) -> int:
    """Return the number of bytes that may be insignificant space in JSON."""
    return len(text) - len(text.translate(None, b" \t\r\n"))


def check_utf8(body: bytes) -> None:
    """Raise RestError 400 for a body that is not UTF-8 (RFC 8259 section 8.1)."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(error) from error


def _checked(records: list[Entry] | msgspec.UnsetType, limit: int) -> list[Entry]:
    if isinstance(records, msgspec.UnsetType):
        raise unprocessable("The body has no list of records")
    if len(records) > limit:
        raise RestError(413, f"The request has {len(records)} records; at most {limit} are allowed")
    return records


def _not_utf8(error: UnicodeDecodeError) -> RestError:
    return RestError(400, f"Validation error on: the body is not UTF-8 at byte {error.start}")


def _bad_field(error: RestError) -> str | None:
    """Return `key` or `value` if the error says that a record's key or value is not a string."""
    if not error.validation_errors:
        return None
    text, _, path = error.validation_errors[0].partition(_PATH)
    if not text.startswith("Expected `str"):
        return None
    for name in ("key", "value"):
        if path.endswith(f"].{name}`") and ".headers[" not in path:
            return name
    return None
