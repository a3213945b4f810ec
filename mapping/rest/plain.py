"""Maps records of HTTP bodies that have only a key and a value, as nearly all do.

This is the reference, which runs where the C extension is not built. `_native.c` does the same (ADR 0057), and
`mapping.rest.incoming` uses it if it can.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import Final

import msgspec

from mapping.record import Headers, Record
from protocols.rest.errors import unprocessable
from protocols.rest.requests import JsonRecord, RecordFields, TextRecord

_QUOTE: Final = 0x22
_ESCAPE: Final = 0x5C
_NULL: Final = b"null"
_STRING: Final = msgspec.json.Decoder(str)


def json_records(
    entries: list[JsonRecord],
    topic: str,
    partition: int | None,
    headers: Headers,
    more: Callable[[int, JsonRecord], Record],
    /,
) -> list[Record]:
    """Map entries in the json format; `more` maps those with further fields, from their index and the entry.

    Raises:
        RestError: From `more`.
    """
    return [
        more(index, entry)
        if entry.key_format is not None or entry.value_format is not None or _has_more_fields(entry)
        else Record(topic, json_key(bytes(entry.key)), json_value(bytes(entry.value)), headers, None, partition)
        for index, entry in enumerate(entries)
    ]


def text_records(  # noqa: PLR0917 - as above
    entries: list[TextRecord],
    topic: str,
    partition: int | None,
    headers: Headers,
    more: Callable[[int, TextRecord], Record],
    binary: bool,
    /,
) -> list[Record]:
    """Like `json_records`, for the text and binary formats.

    Raises:
        RestError: From `more`; 422 for malformed base64.
    """
    content = from_base64 if binary else from_text
    return [
        more(index, entry)
        if _has_more_fields(entry)
        else Record(topic, content(entry.key), content(entry.value), headers, None, partition)
        for index, entry in enumerate(entries)
    ]


def _has_more_fields(entry: RecordFields) -> bool:
    return entry.partition is not msgspec.UNSET or entry.timestamp is not None or bool(entry.headers)


def json_key(text: bytes) -> bytes | None:
    """Return the stored key for a JSON text; a string becomes its bare text."""
    if text[0] == _QUOTE:
        return text[1:-1] if _ESCAPE not in text else _STRING.decode(text).encode()
    return json_value(text)


def json_value(text: bytes) -> bytes | None:
    """Return the stored value for a JSON text; null becomes a tombstone."""
    return None if text == _NULL else compact_json(text)


def compact_json(raw: msgspec.Raw | bytes) -> bytes:
    """Return the JSON text without insignificant space; digits and repeated names are preserved."""
    return msgspec.json.format(bytes(raw), indent=-1)


def from_text(text: str | None) -> bytes | None:
    """Encode text as UTF-8."""
    return None if text is None else text.encode()


def from_base64(text: str | None) -> bytes | None:
    """Decode base64 (RFC 4648 section 4); only the padding may be missing. RestError 422."""
    if text is None:
        return None
    padded = text
    if len(text) % 4 or text.endswith("="):
        bare = text.rstrip("=")
        missing = -len(bare) % 4
        if len(text) - len(bare) > missing:  # binascii accepts it
            raise unprocessable(f"{text[:32]!r} is not base64: too much padding")
        padded = bare + "=" * missing
    try:
        return binascii.a2b_base64(padded, strict_mode=True)
    except ValueError as error:
        raise unprocessable(f"{text[:32]!r} is not base64: {error}") from error
