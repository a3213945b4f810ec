"""Decoding and encoding of AMQP 1.0 values (part 1).

It is needed where proton's own decoding loses information or raises: message sections, SASL frames, and the fields of
open and attach. Any bytes give a value or `DecodeError`, nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, NamedTuple

from protocols.amqp.outcomes import DECODE_ERROR

DEPTH_LIMIT: Final = 32  # nested compounds; Artemis has the same limit


class DecodeError(ValueError):
    """The peer's bytes are no valid AMQP value or message."""

    condition: Final = DECODE_ERROR


class Symbol(str):
    """An AMQP symbol: an ASCII name from a fixed vocabulary."""

    __slots__ = ()


class Timestamp(int):
    """An AMQP timestamp: milliseconds since the epoch."""

    __slots__ = ()


class Described(NamedTuple):
    """A value with its descriptor (part 1.1.2)."""

    descriptor: Any
    value: Any


class Raw(NamedTuple):
    """The encoded form of a value without a Python type (decimals, chars outside Unicode)."""

    data: bytes


class Pairs(tuple[tuple[Any, Any], ...]):
    """An AMQP map with order and duplicates as received; no dict, because a peer may send unhashable keys."""

    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the first value of `key`."""
        for have, value in self:
            if have == key:
                return value
        return default


_I8, _U16, _I16 = Struct(">b"), Struct(">H"), Struct(">h")
_U32, _I32, _F32 = Struct(">I"), Struct(">i"), Struct(">f")
_U64, _I64, _F64 = Struct(">Q"), Struct(">q"), Struct(">d")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError("a string that is not UTF-8") from None


def _symbol(data: bytes) -> Symbol:
    try:
        return Symbol(data.decode("ascii"))
    except UnicodeDecodeError:
        raise DecodeError("a symbol that is not ASCII") from None


def _char(data: bytes) -> Any:
    code = _U32.unpack(data)[0]
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        return Raw(b"\x73" + data)
    return Described("char", chr(code))


def _boolean(data: bytes) -> bool:
    if data not in (b"\x00", b"\x01"):
        raise DecodeError("a boolean that is neither 0 nor 1")
    return data == b"\x01"


def _number(form: Struct) -> Callable[[bytes], Any]:
    return lambda data: form.unpack(data)[0]


def _raw(code: int) -> Callable[[bytes], Raw]:
    return lambda data: Raw(bytes((code,)) + data)


_CONSTANTS: Final[dict[int, Any]] = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0}

_FIXED: Final[dict[int, Callable[[bytes], Any]]] = {
    0x50: lambda data: data[0], 0x51: _number(_I8), 0x52: lambda data: data[0], 0x53: lambda data: data[0],
    0x54: _number(_I8), 0x55: _number(_I8), 0x56: _boolean,
    0x60: _number(_U16), 0x61: _number(_I16),
    0x70: _number(_U32), 0x71: _number(_I32), 0x72: _number(_F32), 0x73: _char, 0x74: _raw(0x74),
    0x80: _number(_U64), 0x81: _number(_I64), 0x82: _number(_F64), 0x84: _raw(0x84),
    0x83: lambda data: Timestamp(_I64.unpack(data)[0]),
    0x94: _raw(0x94), 0x98: lambda data: uuid.UUID(bytes=data),
}  # fmt: skip

_VARIABLE: Final[dict[int, Callable[[bytes], Any]]] = {
    0xA0: bytes, 0xB0: bytes, 0xA1: _text, 0xB1: _text, 0xA3: _symbol, 0xB3: _symbol,
}  # fmt: skip

MAP_CODES: Final = frozenset({0xC1, 0xD1})
_COMPOUND: Final = frozenset({0xC0, 0xD0, *MAP_CODES})
_ARRAYS: Final = frozenset({0xE0, 0xF0})
KNOWN_CODES: Final = frozenset({0x45, *_CONSTANTS, *_FIXED, *_VARIABLE, *_COMPOUND, *_ARRAYS})
"""Every constructor of part 1.6."""

_WIDTHS: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}  # part 1.2, by the constructor's upper four bits


def skip(data: bytes, at: int, end: int) -> int:
    """Return where the value that starts at `at` ends, without decoding it.

    Raises:
        DecodeError: the value reaches beyond `end`, or its constructor is unknown.
    """
    try:
        code = data[at]
        while code == 0:
            at = skip(data, at + 1, end)
            code = data[at]
        if code not in KNOWN_CODES:
            raise DecodeError(f"unknown constructor 0x{code:02x}")
        high = code >> 4
        width = _WIDTHS.get(high)
        if width is not None:
            after = at + 1 + width
        elif high & 1:
            after = at + 5 + _U32.unpack_from(data, at + 1)[0]
        else:
            after = at + 2 + data[at + 1]
    except (IndexError, struct_error):
        raise DecodeError("a value ends too early") from None
    except RecursionError:
        raise DecodeError("nested too deep") from None
    if after > end:
        raise DecodeError("a value ends too early")
    return int(after)


def decode(data: bytes, at: int, end: int, depth: int = DEPTH_LIMIT) -> tuple[Any, int]:
    """Decode the value at `at`; return it and where the next one starts.

    Integers of every width give int, floats float, lists list, maps `Pairs`, arrays tuple, described values
    `Described`, decimals `Raw`.

    Raises:
        DecodeError: the bytes are no valid value.
    """
    if at >= end:
        raise DecodeError("a value ends too early")
    code = data[at]
    if code in _CONSTANTS:
        return _CONSTANTS[code], at + 1
    if code == 0x45:
        return [], at + 1
    if code == 0:
        if depth <= 0:
            raise DecodeError("nested too deep")
        descriptor, at = decode(data, at + 1, end, depth - 1)
        value, at = decode(data, at, end, depth - 1)
        return Described(descriptor, value), at
    after = skip(data, at, end)
    if code in _FIXED:
        return _FIXED[code](data[at + 1 : after]), after
    wide = (code >> 4) & 1
    start = at + (5 if wide else 2)
    if code in _VARIABLE:
        return _VARIABLE[code](data[start:after]), after
    if depth <= 0:
        raise DecodeError("nested too deep")
    if code in _ARRAYS:
        return _decode_array(data, start, after, bool(wide), depth - 1), after
    items = decode_items(data, at, after, depth - 1)
    if code in (0xC0, 0xD0):
        return items, after
    if len(items) % 2:
        raise DecodeError("a map with an odd number of items")
    return Pairs(zip(items[::2], items[1::2], strict=True)), after


def compound(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return (count, offset of the first item, end) of the list or map at `at`."""
    after = skip(data, at, end)
    code = data[at]
    if code == 0x45:
        return 0, after, after
    try:
        if code in (0xC0, 0xC1):
            return data[at + 2], at + 3, after
        if code in (0xD0, 0xD1):
            return _U32.unpack_from(data, at + 5)[0], at + 9, after
    except (IndexError, struct_error):
        raise DecodeError("a compound without a count") from None
    raise DecodeError(f"expected a list or a map, got 0x{code:02x}")


def decode_items(data: bytes, at: int, end: int, depth: int = DEPTH_LIMIT) -> list[Any]:
    """Decode the items of the list or map at `at`; a map gives keys and values alternately."""
    count, place, after = compound(data, at, end)
    if count > after - place:
        raise DecodeError("a count that exceeds the size")  # every item takes at least one byte
    items: list[Any] = []
    for _ in range(count):
        item, place = decode(data, place, after, depth)
        items.append(item)
    if place != after:
        raise DecodeError("bytes after the last item")
    return items


def _decode_array(data: bytes, start: int, end: int, wide: bool, depth: int) -> tuple[Any, ...]:
    """Decode an array: one constructor, then the values without theirs (part 1.6.23)."""
    try:
        count, at = (_U32.unpack_from(data, start)[0], start + 4) if wide else (data[start], start + 1)
        descriptors: list[Any] = []
        while data[at] == 0:
            if len(descriptors) >= depth:
                raise DecodeError("nested too deep")
            descriptor, at = decode(data, at + 1, end, depth - 1)
            descriptors.append(descriptor)
        code = data[at : at + 1]
    except (IndexError, struct_error):
        raise DecodeError("an array ends too early") from None
    at += 1
    if at > end:
        raise DecodeError("an array ends too early")
    empty = code[0] in _CONSTANTS or code[0] == 0x45
    if count > (end - at if not empty else DEPTH_LIMIT * 1024):
        raise DecodeError("a count that exceeds the size")
    values: list[Any] = []
    for _ in range(count):
        if empty:
            value, size = decode(code, 0, 1, depth)[0], 0
        else:
            head = data[at : at + 4] if code[0] >> 4 in (0xB, 0xD, 0xF) else data[at : at + 1]
            length = skip(code + head + bytes(max(0, 4 - len(head))), 0, 1 << 40) - 1
            if length > end - at:
                raise DecodeError("an array ends too early")
            value, size = decode(code + data[at : at + length], 0, 1 + length, depth)[0], length
        at += size
        if at > end:
            raise DecodeError("an array ends too early")
        for descriptor in reversed(descriptors):
            value = Described(descriptor, value)
        values.append(value)
    if at != end:
        raise DecodeError("bytes after the last item")
    return tuple(values)


# Encoding, in the smallest form of each type.

NULL: Final = b"\x40"
TRUE: Final = b"\x41"
FALSE: Final = b"\x42"


def _sized(small: int, data: bytes) -> bytes:
    size = len(data)
    if size < 256:
        return bytes((small, size)) + data
    return bytes((small + 0x10,)) + _U32.pack(size) + data


def binary(value: bytes) -> bytes:
    """Encode a binary."""
    return _sized(0xA0, value)


def string(value: str) -> bytes:
    """Encode a string."""
    return _sized(0xA1, value.encode())


def symbol(value: str) -> bytes:
    """Encode a symbol. Raises UnicodeEncodeError when it is not ASCII."""
    return _sized(0xA3, value.encode("ascii"))


def ubyte(value: int) -> bytes:
    """Encode an unsigned byte."""
    return bytes((0x50, value))


def uint(value: int) -> bytes:
    """Encode an unsigned 32-bit integer."""
    if value == 0:
        return b"\x43"
    return bytes((0x52, value)) if value < 256 else b"\x70" + _U32.pack(value)


def ulong(value: int) -> bytes:
    """Encode an unsigned 64-bit integer."""
    if value == 0:
        return b"\x44"
    return bytes((0x53, value)) if value < 256 else b"\x80" + _U64.pack(value)


def integer(value: int) -> bytes:
    """Encode a signed 32-bit integer."""
    return b"\x54" + _I8.pack(value) if -128 <= value < 128 else b"\x71" + _I32.pack(value)


def long(value: int) -> bytes:
    """Encode a signed 64-bit integer."""
    return b"\x55" + _I8.pack(value) if -128 <= value < 128 else b"\x81" + _I64.pack(value)


def timestamp(value: int) -> bytes:
    """Encode a timestamp, in milliseconds since the epoch."""
    return b"\x83" + _I64.pack(value)


def ushort(value: int) -> bytes:
    """Encode an unsigned 16-bit integer."""
    return b"\x60" + _U16.pack(value)


def byte(value: int) -> bytes:
    """Encode a signed byte."""
    return b"\x51" + _I8.pack(value)


def short(value: int) -> bytes:
    """Encode a signed 16-bit integer."""
    return b"\x61" + _I16.pack(value)


def float_value(value: float) -> bytes:
    """Encode a 32-bit float."""
    return b"\x72" + _F32.pack(value)


def char(value: str) -> bytes:
    """Encode a single character. Raises TypeError when it is not exactly one."""
    return b"\x73" + _U32.pack(ord(value))


def boolean(value: bool) -> bytes:
    """Encode a boolean."""
    return TRUE if value else FALSE


def double(value: float) -> bytes:
    """Encode a 64-bit float."""
    return b"\x82" + _F64.pack(value)


def uuid_value(value: uuid.UUID) -> bytes:
    """Encode a UUID."""
    return b"\x98" + value.bytes


def list_of(items: Iterable[bytes]) -> bytes:
    """Encode a list from encoded items."""
    return _compound(0xC0, list(items))


def map_of(items: Iterable[bytes]) -> bytes:
    """Encode a map from encoded keys and values, alternately."""
    return _compound(0xC1, list(items))


def symbols(values: Iterable[str]) -> bytes:
    """Encode an array of symbols."""
    data = [value.encode("ascii") for value in values]
    body = b"".join(bytes((len(item),)) + item for item in data)
    return _array(0xE0, len(data), b"\xa3" + body)


def described(code: int, value: bytes) -> bytes:
    """Encode a described value: `code` is a descriptor of the specification, `value` is encoded."""
    return b"\x00" + ulong(code) + value


def _compound(small: int, items: list[bytes]) -> bytes:
    if not items and small == 0xC0:
        return b"\x45"
    return _array(small, len(items), b"".join(items))


def _array(small: int, count: int, body: bytes) -> bytes:
    size = len(body) + 1
    if size < 256 and count < 256:
        return bytes((small, size, count)) + body
    return bytes((small + 0x10,)) + _U32.pack(len(body) + 4) + _U32.pack(count) + body
