"""Makes the bytes of a record's key and value from what a body has for them: JSON, text or base64. Pure."""

from __future__ import annotations

import binascii
from typing import Final

import msgspec

from protocols.rest.errors import unprocessable

_QUOTE: Final = 0x22
_NULL: Final = b"null"
_STRING: Final = msgspec.json.Decoder(str)


def json_key(text: bytes) -> bytes | None:
    """Return the stored key for a JSON text; a string becomes its bare text."""
    if text[0] == _QUOTE:
        return _STRING.decode(text).encode()
    return json_value(text)


def json_value(text: bytes) -> bytes | None:
    """Return the stored value for a JSON text; null becomes a tombstone."""
    return None if text == _NULL else compact_json(text)


def compact_json(raw: msgspec.Raw | bytes) -> bytes:
    """Return the JSON text without insignificant space; digits and repeated names are preserved."""
    return msgspec.json.format(raw, indent=-1)


def from_text(text: str | None) -> bytes | None:
    """Encode text as UTF-8."""
    return None if text is None else text.encode()


def from_base64(text: str | None) -> bytes | None:
    """Decode base64 (RFC 4648 section 4); only the padding may be missing. RestError 422."""
    if text is None:
        return None
    bare = text.rstrip("=")
    missing = -len(bare) % 4
    if len(text) - len(bare) > missing:  # binascii accepts it
        raise unprocessable(f"{text[:32]!r} is not base64: too much padding")
    try:
        return binascii.a2b_base64(bare + "=" * missing, strict_mode=True)
    except ValueError as error:
        raise unprocessable(f"{text[:32]!r} is not base64: {error}") from error
