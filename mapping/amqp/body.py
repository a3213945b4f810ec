"""Converting the body of an AMQP message to a Kafka value, and back.

The bytes of a single Data section, the usual body, become the value, and no header is needed. For all other bodies
the header `amqp.body` describes the form:

    data:5,7        several Data sections of these lengths, concatenated (`data:` without a length: no body at all)
    v:str v:bin     the bytes of an amqp-value string or binary
    v:null          an amqp-value null: a tombstone
    json:<crc>      another amqp-value or sequences, as JSON; the exact bytes are in `amqp.sections`, and are used only
                    if the value still has this CRC-32
    raw             the encoded sections, because JSON cannot represent them

`HEX/` before a length or after `v:str` gives the bytes before the content, if these are not the shortest encoding.
"""

from __future__ import annotations

import base64
import math
import uuid
import zlib
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import msgspec

from protocols.amqp import sections
from protocols.amqp.primitives import DEPTH_LIMIT, MAP_CODES, DecodeError, Described, Pairs, Raw, compound, decode
from protocols.amqp.sections import DATA, SEQUENCE, Section, binary_at

JSON_LIMIT: Final = 65536  # bytes; a body up to this size is stored as JSON and encoded, a larger one only encoded
JSON_TYPE: Final = b"application/json"

_COMPOUNDS: Final = frozenset({0xC0, 0xD0, *MAP_CODES})
_NULL_VALUE: Final = b"\x00\x53\x77\x40"


class Body(msgspec.Struct, frozen=True, gc=False):
    """A body as it is stored in Kafka."""

    value: bytes | None  # the record's value
    form: bytes | None = None  # the header `amqp.body`; None when it is not needed
    exact: bytes | None = None  # the body's sections, to be stored in the sections header
    is_json: bool = False  # whether the value is JSON that was made from AMQP values


def data_section(value: bytes) -> bytes:
    """Encode `value` as a Data section of the shortest form."""
    size = len(value)
    if size < 256:
        return b"\x00\x53\x75\xa0" + bytes((size,)) + value
    return b"\x00\x53\x75\xb0" + size.to_bytes(4, "big") + value


def to_value(data: bytes, body: list[Section]) -> Body:
    """Convert the body sections of a message to a record's value. Raises DecodeError."""
    if not body:
        return Body(b"", b"data:")
    code, start, at, end = body[0]
    if code == DATA:
        if len(body) == 1:
            if data[at] == 0xA0 and at - start == 3:  # the usual form
                return Body(data[at + 2 : end])
            value = binary_at(data, at, end)
            prefix = _prefix(data[start:end], value, 0x75, 0xA0)
            return Body(value, None if prefix is None else f"data:{prefix}/{len(value)}".encode())
        parts: list[bytes] = []
        notes: list[str] = []
        for _, start, at, end in body:
            part = binary_at(data, at, end)
            prefix = _prefix(data[start:end], part, 0x75, 0xA0)
            notes.append(str(len(part)) if prefix is None else f"{prefix}/{len(part)}")
            parts.append(part)
        return Body(b"".join(parts), f"data:{','.join(notes)}".encode())
    if code != SEQUENCE:
        constructor = data[at]
        if constructor == 0x40 and at - start == 3:
            return Body(None, b"v:null")
        if constructor in (0xA1, 0xB1, 0xA0, 0xB0):
            text = constructor in (0xA1, 0xB1)
            value = data[at + (2 if constructor < 0xB0 else 5) : end]
            if text:
                decode(data, at, end)  # must be UTF-8
            prefix = _prefix(data[start:end], value, 0x77, 0xA1 if text else 0xA0)
            form = "v:str" if text else "v:bin"
            return Body(value, (form if prefix is None else f"{form}:{prefix}/").encode())
    exact = data[body[0][1] : body[-1][3]]
    if len(exact) <= JSON_LIMIT:
        try:
            value = _json(data, body, code == SEQUENCE)
        except _NotJsonError:
            pass  # such as decimals: stored as raw sections below
        else:
            return Body(value, b"json:%08x" % zlib.crc32(value), exact, True)
    for _, _, at, end in body:
        decode(data, at, end)
    return Body(exact, b"raw")


def from_value(value: bytes | None, form: bytes | None, exact: bytes | None) -> bytes:
    """Convert a record's value to body sections.

    `form` is the header `amqp.body`, `exact` are the body's sections from the sections header. A form that does not fit
    the value is ignored, because another producer may have changed the value and kept the headers: the value is then
    sent as one Data section. A null value gives an empty Data section, unless `form` is `v:null`.
    """
    if value is None:
        return _NULL_VALUE if form == b"v:null" else data_section(b"")
    if form is not None:
        try:
            known = _from_form(value, form, exact)
        except (ValueError, DecodeError):
            known = None  # it does not fit
        if known is not None:
            return known
    return data_section(value)


def _from_form(value: bytes, form: bytes, exact: bytes | None) -> bytes | None:
    kind, _, rest = form.decode("ascii").partition(":")
    if kind == "data":
        return _split(value, rest)
    if kind == "v":
        name, _, prefix = rest.partition(":")
        if name == "str":
            value.decode()
        elif name != "bin":
            return None
        if not prefix:
            return _value_section(value, name == "str")
        return _checked(bytes.fromhex(prefix.removesuffix("/")) + value, sections.VALUE)
    if kind == "json":
        return exact if exact is not None and rest == f"{zlib.crc32(value):08x}" else None
    return _checked(value, None) if kind == "raw" else None


def _split(value: bytes, lengths: str) -> bytes | None:
    if not lengths:
        return None if value else b""
    parts: list[bytes] = []
    at = 0
    for note in lengths.split(","):
        prefix, _, length = note.rpartition("/")
        size = int(length)
        part = value[at : at + size]
        if size < 0 or len(part) != size:
            return None
        parts.append(_checked(bytes.fromhex(prefix) + part, DATA) if prefix else data_section(part))
        at += size
    return b"".join(parts) if at == len(value) else None


def _checked(data: bytes, code: int | None) -> bytes:
    """Return `data` if it is valid body sections (with `code`: one of that kind). Raises DecodeError."""
    found = sections.scan(data)
    if not found or (code is not None and (len(found) != 1 or found[0][0] != code)):
        raise DecodeError("not the sections that the header announces")
    for section_code, _, at, end in found:
        if section_code not in (DATA, SEQUENCE, sections.VALUE):
            raise DecodeError("not a body")
        decode(data, at, end)
    return data


def _value_section(value: bytes, text: bool) -> bytes:
    code = 0xA1 if text else 0xA0
    size = len(value)
    if size < 256:
        return b"\x00\x53\x77" + bytes((code, size)) + value
    return b"\x00\x53\x77" + bytes((code + 0x10,)) + size.to_bytes(4, "big") + value


def _prefix(whole: bytes, value: bytes, section: int, small: int) -> str | None:
    """Return the bytes before the content in hex, or None when they are the shortest encoding."""
    size = len(value)
    if size < 256:
        usual = bytes((0, 0x53, section, small, size))
    else:
        usual = bytes((0, 0x53, section, small + 0x10)) + size.to_bytes(4, "big")
    have = whole[: len(whole) - size]
    return None if have == usual else have.hex()


class _NotJsonError(Exception):
    """A value that JSON cannot represent."""


def _json(data: bytes, body: list[Section], sequence: bool) -> bytes:
    """Encode the body as canonical JSON: maps in received order, binaries as base64, timestamps as epoch milliseconds.

    Raises:
        DecodeError: a value is invalid.
        _NotJsonError: JSON cannot represent a value; the values after it have not been checked.
    """
    try:
        plain = [_plain_at(data, at, end, DEPTH_LIMIT)[0] for _, _, at, end in body]
    except UnicodeDecodeError:
        raise DecodeError("a string that is not UTF-8") from None
    found = plain[0] if not sequence else plain[0] if len(plain) == 1 else plain
    return msgspec.json.encode(found)


_NUMBERS: Final[dict[int, tuple[int, Callable[[bytes, int], tuple[Any, ...]]]]] = {
    code: (1 + form.size, form.unpack_from)
    for code, form in {
        0x50: Struct(">B"), 0x51: Struct(">b"), 0x52: Struct(">B"), 0x53: Struct(">B"), 0x54: Struct(">b"),
        0x55: Struct(">b"), 0x60: Struct(">H"), 0x61: Struct(">h"), 0x70: Struct(">I"), 0x71: Struct(">i"),
        0x80: Struct(">Q"), 0x81: Struct(">q"), 0x83: Struct(">q"), 0x72: Struct(">f"), 0x82: Struct(">d"),
    }.items()
}  # fmt: skip
"""Numbers by their constructor (part 1.6): size in bytes with the constructor, and the unpacking function."""
_FLOATS: Final = frozenset({0x72, 0x82})
_CONSTANTS: Final[dict[int, Any]] = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0}


def _plain_at(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    """Decode the value at `at` as a Python value for JSON; return it and where the next value starts.

    JSON's own types are decoded here, which is faster; all others by the general decoder.

    Raises:
        DecodeError, UnicodeDecodeError: the bytes are no valid value.
        _NotJsonError: JSON cannot represent it.
    """
    code = data[at] if at < end else -1
    if code == 0xA1 and at + 2 <= end:
        start = at + 2
        after = start + data[at + 1]
        if after <= end:
            return data[start:after].decode(), after
    elif code in _NUMBERS:
        size, unpack = _NUMBERS[code]
        if at + size <= end:
            number = unpack(data, at + 1)[0]
            if code in _FLOATS and not math.isfinite(number):
                raise _NotJsonError
            return number, at + size
    elif code in _CONSTANTS:
        return _CONSTANTS[code], at + 1
    elif code in _COMPOUNDS and depth > 0:
        return _plain_items(data, at, end, depth - 1)
    value, after = decode(data, at, end, depth)
    return _plain(value), after


def _plain_items(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    """Like `_plain_at`, for a map or list; `depth` limits the nesting of its items."""
    count, place, after = compound(data, at, end)
    is_map = data[at] in MAP_CODES
    if count > after - place or (is_map and count % 2):
        raise DecodeError("a count that exceeds the size, or a map with an odd number of items")
    plain: Any
    if is_map:
        plain = {}
        for _ in range(count // 2):
            key, place = _plain_at(data, place, after, depth)
            name = key if type(key) is str else msgspec.json.encode(key).decode()
            if name in plain:
                raise _NotJsonError
            plain[name], place = _plain_at(data, place, after, depth)
    else:
        plain = []
        for _ in range(count):
            item, place = _plain_at(data, place, after, depth)
            plain.append(item)
    if place != after:
        raise DecodeError("bytes after the last item")
    return plain, after


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _NotJsonError
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Described):
        return _plain(value.value)
    if isinstance(value, Pairs):
        found: dict[str, Any] = {}
        for key, item in value:
            plain = _plain(key)
            name = plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
            if name in found:
                raise _NotJsonError
            found[name] = _plain(item)
        return found
    if isinstance(value, Raw):
        raise _NotJsonError
    return [_plain(item) for item in value]
