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
from typing import Any, Final, NoReturn

import msgspec

from protocols.amqp import primitives
from protocols.amqp.primitives import TYPES, DecodeError, Raw, Types, decode, described
from protocols.amqp.sections import DATA, SEQUENCE, VALUE, Section, binary_at, scan

JSON_LIMIT: Final = 65536  # bytes; a body up to this size is stored as JSON and encoded, a larger one only encoded
JSON_TYPE: Final = b"application/json"


class Body(msgspec.Struct, frozen=True, gc=False):
    """A body as it is stored in Kafka."""

    value: bytes | None  # the record's value
    form: bytes | None = None  # the header `amqp.body`; None when it is not needed
    exact: bytes | None = None  # the body's sections, to be stored in the sections header
    is_json: bool = False  # whether the value is JSON that was made from AMQP values


def data_section(value: bytes) -> bytes:
    """Encode `value` as a Data section of the shortest form."""
    return b"\x00\x53\x75" + primitives.binary(value)


def _value_section(content: str | bytes) -> bytes:
    return described(VALUE, primitives.string(content) if isinstance(content, str) else primitives.binary(content))


def to_value(data: bytes, body: list[Section]) -> Body:
    """Convert the body sections of a message to a record's value. Raises DecodeError."""
    if not body:
        return Body(b"", b"data:")
    code, start, at, end = body[0]
    if code == DATA:
        parts: list[bytes] = []
        notes: list[str] = []
        for _, start, at, end in body:
            part = binary_at(data, at, end)
            notes.append(f"{_prefix(data[start:end], part, data_section(part))}{len(part)}")
            parts.append(part)
        usual = len(parts) == 1 and "/" not in notes[0]
        return Body(b"".join(parts), None if usual else f"data:{','.join(notes)}".encode())
    if code == VALUE:
        if data[at] == 0x40 and at - start == 3:
            return Body(None, b"v:null")
        if data[at] in (0xA0, 0xA1, 0xB0, 0xB1):
            content, _ = decode(data, at, end)
            value, form = (content, "v:bin") if isinstance(content, bytes) else (content.encode(), "v:str")
            prefix = _prefix(data[start:end], value, _value_section(content))
            return Body(value, (f"{form}:{prefix}" if prefix else form).encode())
    exact = data[body[0][1] : body[-1][3]]
    if len(exact) <= JSON_LIMIT:
        try:
            values = [decode(data, at, end, types=_JSON_TYPES)[0] for _, _, at, end in body]
            value = msgspec.json.encode(values[0] if len(values) == 1 else values)
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
        return described(VALUE, primitives.NULL) if form == b"v:null" else data_section(b"")
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
        if name not in ("str", "bin"):
            return None
        content = value.decode() if name == "str" else value
        if not prefix:
            return _value_section(content)
        return _checked(bytes.fromhex(prefix.removesuffix("/")) + value, VALUE)
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
    sections = scan(data)
    if not sections or (code is not None and (len(sections) != 1 or sections[0][0] != code)):
        raise DecodeError("not the sections that the header announces")
    for section_code, _, at, end in sections:
        if section_code not in (DATA, SEQUENCE, VALUE):
            raise DecodeError("not a body")
        decode(data, at, end)
    return data


def _prefix(section: bytes, content: bytes, shortest: bytes) -> str:
    """Return the bytes before the content in hex and a slash; nothing when the section is the shortest encoding."""
    return "" if section == shortest else f"{section[: len(section) - len(content)].hex()}/"


class _NotJsonError(Exception):
    """A value that JSON cannot represent."""


def _not_json(_: bytes) -> NoReturn:
    raise _NotJsonError


def _finite(decoded: Callable[[bytes], float]) -> Callable[[bytes], float]:
    def convert(data: bytes) -> float:
        number = decoded(data)
        if not math.isfinite(number):
            raise _NotJsonError
        return number

    return convert


def _char(data: bytes) -> str:
    character = TYPES[0x73](data)
    if isinstance(character, Raw):
        raise _NotJsonError
    return str(character.value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _symbol(data: bytes) -> str:
    return data.decode("ascii")


def _object(items: list[Any]) -> dict[str, Any]:
    following = iter(items)
    members = {
        key if type(key) is str else msgspec.json.encode(key).decode(): value
        for key, value in zip(following, following, strict=True)
    }
    if 2 * len(members) != len(items):
        raise _NotJsonError  # a name is repeated
    return members


_JSON_TYPES: Final[Types] = {
    **TYPES,
    0x00: lambda _, value: value,
    0x72: _finite(TYPES[0x72]), 0x82: _finite(TYPES[0x82]), 0x73: _char, 0x83: TYPES[0x81],
    0x74: _not_json, 0x84: _not_json, 0x94: _not_json, 0x98: lambda data: str(uuid.UUID(bytes=data)),
    0xA0: _base64, 0xB0: _base64, 0xA3: _symbol, 0xB3: _symbol, 0xC1: _object, 0xD1: _object,
}  # fmt: skip
"""Makes values for canonical JSON: maps in received order, binaries as base64, timestamps as epoch milliseconds. Raises
_NotJsonError when JSON cannot represent a value; the values after it have not been checked."""
