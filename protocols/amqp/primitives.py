"""Decoding and encoding of AMQP 1.0 values (part 1).

It is needed where proton's own decoding loses information or raises: message sections, SASL frames, and the fields of
open and attach. Any bytes give a value or `DecodeError`, nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from typing import Any, Final, NamedTuple

from protocols.amqp.outcomes import DECODE_ERROR

DEPTH_LIMIT: Final = 32  # nested compounds; Artemis has the same limit
EMPTY_LIMIT: Final = 16  # items of an array that have no bytes: each costs memory that its sender did not pay for


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


_CODES: Final = {
    "amqp:accepted:list": 0x24, "amqp:rejected:list": 0x25, "amqp:released:list": 0x26, "amqp:modified:list": 0x27,
    "amqp:declare:list": 0x31, "amqp:discharge:list": 0x32,
    "amqp:sasl-init:list": 0x41, "amqp:sasl-response:list": 0x43,
    "amqp:header:list": 0x70, "amqp:delivery-annotations:map": 0x71, "amqp:message-annotations:map": 0x72,
    "amqp:properties:list": 0x73, "amqp:application-properties:map": 0x74, "amqp:data:binary": 0x75,
    "amqp:amqp-sequence:list": 0x76, "amqp:amqp-value:*": 0x77, "amqp:footer:map": 0x78,
}  # fmt: skip
"""The descriptors of the specification that a peer may write as symbols to us."""


def code_of(descriptor: Any) -> int | None:
    """Return the number of a descriptor of the specification; None for a foreign symbol, or what is no descriptor."""
    if type(descriptor) is Symbol:
        return _CODES.get(descriptor)
    return descriptor if type(descriptor) is int else None


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


_U8, _I8, _U16, _I16 = Struct(">B"), Struct(">b"), Struct(">H"), Struct(">h")
_U32, _I32, _F32 = Struct(">I"), Struct(">i"), Struct(">f")
_U64, _I64, _F64 = Struct(">Q"), Struct(">q"), Struct(">d")


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
    unpack = form.unpack
    return lambda data: unpack(data)[0]


def _raw(code: int) -> Callable[[bytes], Raw]:
    return lambda data: Raw(bytes((code,)) + data)


def _pairs(items: list[Any]) -> Pairs:
    following = iter(items)
    return Pairs(zip(following, following, strict=True))


Types = Mapping[int, Callable[..., Any]]
"""Every constructor of part 1.6, with the function that makes the value: of the bytes of its content; of the decoded
items of a list, map or array; for 0, a described value, of descriptor and value."""

TYPES: Final[Types] = {
    0x00: Described,
    0x40: lambda _: None, 0x41: lambda _: True, 0x42: lambda _: False, 0x43: lambda _: 0, 0x44: lambda _: 0, 0x45: list,
    0x50: ord, 0x51: _number(_I8), 0x52: ord, 0x53: ord, 0x54: _number(_I8), 0x55: _number(_I8), 0x56: _boolean,
    0x60: _number(_U16), 0x61: _number(_I16),
    0x70: _number(_U32), 0x71: _number(_I32), 0x72: _number(_F32), 0x73: _char, 0x74: _raw(0x74),
    0x80: _number(_U64), 0x81: _number(_I64), 0x82: _number(_F64), 0x84: _raw(0x84),
    0x83: lambda data: Timestamp(_I64.unpack(data)[0]),
    0x94: _raw(0x94), 0x98: lambda data: uuid.UUID(bytes=data),
    0xA0: bytes, 0xB0: bytes, 0xA1: bytes.decode, 0xB1: bytes.decode,
    0xA3: lambda data: Symbol(data, "ascii"), 0xB3: lambda data: Symbol(data, "ascii"),
    0xC0: list, 0xD0: list, 0xC1: _pairs, 0xD1: _pairs, 0xE0: tuple, 0xF0: tuple,
}  # fmt: skip
"""The Python types: integers of every width give int, maps `Pairs`, arrays tuple, decimals `Raw`."""

MAP_CODES: Final = frozenset({0xC1, 0xD1})
_WIDTHS: Final = {code: (0, 1, 2, 4, 8, 16)[(code >> 4) - 4] for code in TYPES if 0x40 <= code < 0xA0}
"""Bytes of the content of the types of fixed width (part 1.2); all others begin with a size of one or four bytes."""


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
        if code in _WIDTHS:
            after = at + 1 + _WIDTHS[code]
        elif code not in TYPES:
            raise DecodeError(f"unknown constructor 0x{code:02x}")
        elif code & 0x10:
            after = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        else:
            after = at + 2 + data[at + 1]
    except IndexError:
        raise DecodeError("a value ends too early") from None
    except RecursionError:
        raise DecodeError("nested too deep") from None
    if after > end:
        raise DecodeError("a value ends too early")
    return after


def decode(data: bytes, at: int, end: int, depth: int = DEPTH_LIMIT, types: Types = TYPES) -> tuple[Any, int]:
    """Decode the value at `at`, to `types`; return it and where the next one starts. Descriptors are always of `TYPES`.

    Raises:
        DecodeError: the bytes are no valid value.
    """
    code = data[at] if at < end else 0x40
    if code == 0:
        if depth <= 0:
            raise DecodeError("nested too deep")
        descriptor, at = decode(data, at + 1, end, depth - 1)
        value, at = decode(data, at, end, depth - 1, types)
        return types[0](descriptor, value), at
    if code in _WIDTHS:
        start = at + 1
        after = start + _WIDTHS[code]
    elif code not in TYPES:
        raise DecodeError(f"unknown constructor 0x{code:02x}")
    elif code & 0x10:
        start = at + 5
        after = start + int.from_bytes(data[at + 1 : start], "big")
    else:
        start = at + 2
        after = start + data[at + 1] if start <= end else start
    if after > end:
        raise DecodeError("a value ends too early")
    if code < 0xC0:
        try:
            return types[code](data[start:after]), after
        except UnicodeDecodeError as error:
            what = "a symbol that is not ASCII" if error.encoding == "ascii" else "a string that is not UTF-8"
            raise DecodeError(what) from None
    if depth <= 0:
        raise DecodeError("nested too deep")
    items = (_items if code < 0xE0 else _array_items)(data, at, after, depth - 1, types)
    if code in MAP_CODES and len(items) % 2:
        raise DecodeError("a map with an odd number of items")
    return types[code](items), after


def _count(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of items of the list, map or array at `at`, and where the first one starts."""
    size = 4 if data[at] & 0x10 else 1  # bytes of the size, and of the count
    first = at + 1 + 2 * size
    return int.from_bytes(data[first - size : first], "big"), first


def compound(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return (count, offset of the first item, end) of the list or map at `at`."""
    after = skip(data, at, end)
    code = data[at]
    if code == 0x45:
        return 0, after, after
    if not 0xC0 <= code < 0xE0:
        raise DecodeError(f"expected a list or a map, got 0x{code:02x}")
    count, first = _count(data, at)
    if first > after:
        raise DecodeError("a compound without a count")
    return count, first, after


def _items(data: bytes, at: int, end: int, depth: int, types: Types) -> list[Any]:
    """Decode the items of the list or map at `at`; a map gives keys and values alternately."""
    count, start = _count(data, at)
    if count > end - start:
        raise DecodeError("a count that exceeds the size")  # every item takes at least one byte
    items: list[Any] = []
    for _ in range(count):
        item, start = decode(data, start, end, depth, types)
        items.append(item)
    if start != end:
        raise DecodeError("bytes after the last item")
    return items


def _array_items(data: bytes, at: int, end: int, depth: int, types: Types) -> list[Any]:
    """Decode an array's items: one constructor, then the values without theirs (part 1.6.23)."""
    count, at = _count(data, at)
    descriptors: list[Any] = []
    while data[at : at + 1] == b"\x00":
        if len(descriptors) >= depth:
            raise DecodeError("nested too deep")
        descriptor, at = decode(data, at + 1, end, depth - 1)
        descriptors.append(descriptor)
    code = data[at : at + 1]
    at += 1
    if at > end:
        raise DecodeError("an array ends too early")
    # An item becomes an object, and so does each of its descriptors.
    if count * max(1, len(descriptors)) > max(end - at, EMPTY_LIMIT):
        raise DecodeError("a count that exceeds the size")
    items: list[Any] = []
    for _ in range(count):
        after = at + skip(code + data[at : at + 4] + bytes(4), 0, 1 << 40) - 1
        if after > end:
            raise DecodeError("an array ends too early")
        item, _ = decode(code + data[at:after], 0, 1 + after - at, depth, types)
        at = after
        for descriptor in reversed(descriptors):
            item = types[0](descriptor, item)
        items.append(item)
    if at != end:
        raise DecodeError("bytes after the last item")
    return items


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


def _fixed(code: int, form: Struct) -> Callable[[Any], bytes]:
    """Make the encoder of a type of fixed width; it raises struct.error for a number out of the type's range."""
    start, pack = bytes((code,)), form.pack
    return lambda value: start + pack(value)


ubyte: Final = _fixed(0x50, _U8)
ushort: Final = _fixed(0x60, _U16)
byte: Final = _fixed(0x51, _I8)
short: Final = _fixed(0x61, _I16)
float_value: Final = _fixed(0x72, _F32)
double: Final = _fixed(0x82, _F64)
timestamp: Final = _fixed(0x83, _I64)
"""In milliseconds since the epoch."""


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


def char(value: str) -> bytes:
    """Encode a single character. Raises TypeError when it is not exactly one."""
    return b"\x73" + _U32.pack(ord(value))


def boolean(value: bool) -> bytes:
    """Encode a boolean."""
    return TRUE if value else FALSE


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
