"""Converting AMQP values to readable header text, and back.

Message and correlation ids have four types in AMQP (part 3.2.4) and one in Kafka: a string is stored without a prefix,
the others with the prefixes of Qpid JMS. The types of application properties are stored in `amqp.types`, one letter per
property.
"""

from __future__ import annotations

import functools
import math
import uuid
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from mapping.record import own_name, stored_name
from protocols.amqp import primitives
from protocols.amqp.primitives import DecodeError, Raw, Timestamp, decode, skip

BINARY_ID: Final = b"AMQP_BINARY:"
UUID_ID: Final = b"AMQP_UUID:"
ULONG_ID: Final = b"AMQP_ULONG:"
STRING_ID: Final = b"AMQP_STRING:"  # escapes a string that starts with `ID_PREFIX`
ID_PREFIX: Final = b"AMQP_"
_ULONG_CODES: Final = frozenset({0x80, 0x53, 0x44})

CLOUD_EVENTS: Final = ("cloudEvents:", "cloudEvents_")  # the two prefixes of the CloudEvents binding for AMQP
CLOUD_EVENTS_KAFKA: Final = "ce_"  # the prefix of the CloudEvents binding for Kafka

STRING_TYPE: Final = "s"
NULL_TYPE: Final = "n"
UNREADABLE_TYPE: Final = "*"


def checked_text(raw: bytes) -> bytes:
    """Return `raw`. Raises DecodeError when it is not UTF-8."""
    if not raw.isascii():
        try:
            raw.decode()
        except UnicodeDecodeError:
            raise DecodeError("a string that is not UTF-8") from None
    return raw


def id_text(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    """Return the message or correlation id at `at` as text, and where the next value starts. Raises DecodeError."""
    code = data[at]
    value, after = decode(data, at, end)
    if value is None:
        return None, after
    if type(value) is str:
        raw = value.encode()
        return (STRING_ID + raw if raw.startswith(ID_PREFIX) else raw), after
    if type(value) is bytes:
        return BINARY_ID + value.hex().encode(), after
    if type(value) is uuid.UUID:
        return UUID_ID + str(value).encode(), after
    if type(value) is int and code in _ULONG_CODES:
        return ULONG_ID + str(value).encode(), after
    raise DecodeError(f"an id of type 0x{code:02x}")


def id_value(text: bytes) -> bytes:
    """Encode an id from a header in the type of its prefix; without one, as a string if it is UTF-8, else a binary."""
    if text.startswith(ID_PREFIX):
        try:
            if text.startswith(BINARY_ID):
                return primitives.binary(bytes.fromhex(text[len(BINARY_ID) :].decode()))
            if text.startswith(UUID_ID):
                return primitives.uuid_value(uuid.UUID(text[len(UUID_ID) :].decode()))
            if text.startswith(ULONG_ID):
                number = int(text[len(ULONG_ID) :])
                if 0 <= number < 1 << 64:
                    return primitives.ulong(number)
            if text.startswith(STRING_ID):
                return primitives.string(text[len(STRING_ID) :].decode())
        except ValueError:
            pass  # another producer wrote it and it only looks like a prefix, so it is a plain string
    return text_or_binary(text)


def text_or_binary(raw: bytes) -> bytes:
    """Encode `raw` as a string if it is UTF-8, else as a binary."""
    try:
        return primitives.string(raw.decode())
    except UnicodeDecodeError:
        return primitives.binary(raw)


def header_name(raw: bytes) -> str:
    """Return the header name for an application property's name. Raises DecodeError when it is not UTF-8."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise DecodeError("a property's name that is not UTF-8") from None
    if name.startswith(CLOUD_EVENTS):
        return CLOUD_EVENTS_KAFKA + name[len(CLOUD_EVENTS[0]) :]
    return stored_name(name)


@functools.lru_cache(maxsize=4096)
def property_name(stored: str) -> str | None:
    """Return the application property's name for a header's name; None when the header is one of the gateway's."""
    if stored.startswith(CLOUD_EVENTS_KAFKA) and len(stored) > len(CLOUD_EVENTS_KAFKA):
        return CLOUD_EVENTS[0] + stored[len(CLOUD_EVENTS_KAFKA) :]
    return own_name(stored)


_FLOAT: Final = Struct(">f")
_DOUBLE: Final = Struct(">d")

_TEXTS: Final[dict[int, tuple[str, Callable[[Any], bytes | None]]]] = {
    0x40: (NULL_TYPE, lambda value: None),
    0x56: ("b", lambda value: b"true" if value else b"false"),
    0x98: ("u", lambda value: str(value).encode()),
    0xA0: ("x", lambda value: value), 0xB0: ("x", lambda value: value),
    0xA1: (STRING_TYPE, lambda value: value.encode()), 0xB1: (STRING_TYPE, lambda value: value.encode()),
    0xA3: ("y", lambda value: value.encode()), 0xB3: ("y", lambda value: value.encode()),
}  # fmt: skip


def _integers(letter: str, size: int, *, signed: bool) -> tuple[str, int, Callable[[bytes], bytes]]:
    if size == 1:
        texts = [b"%d" % int.from_bytes(bytes((byte,)), "big", signed=signed) for byte in range(256)]
        return letter, size, lambda raw: texts[raw[0]]
    return letter, size, lambda raw: b"%d" % int.from_bytes(raw, "big", signed=signed)


FIXED: Final[dict[int, tuple[str, int, Callable[[bytes], bytes]]]] = {
    0x41: ("b", 0, lambda raw: b"true"),
    0x42: ("b", 0, lambda raw: b"false"),
    0x50: _integers("B", 1, signed=False), 0x60: _integers("H", 2, signed=False),
    0x70: _integers("I", 4, signed=False), 0x52: _integers("I", 1, signed=False),
    0x43: _integers("I", 0, signed=False), 0x44: _integers("L", 0, signed=False),
    0x80: _integers("L", 8, signed=False), 0x53: _integers("L", 1, signed=False),
    0x51: _integers("g", 1, signed=True), 0x61: _integers("h", 2, signed=True),
    0x71: _integers("i", 4, signed=True), 0x54: _integers("i", 1, signed=True),
    0x81: _integers("l", 8, signed=True), 0x55: _integers("l", 1, signed=True),
    0x83: _integers("t", 8, signed=True),
    0x72: ("f", 4, lambda raw: repr(_FLOAT.unpack(raw)[0]).encode()),
    0x82: ("d", 8, lambda raw: repr(_DOUBLE.unpack(raw)[0]).encode()),
}  # fmt: skip
"""The types of a fixed width, by constructor: (letter, size in bytes, conversion to text)."""


def property_text(data: bytes, at: int, end: int) -> tuple[str, bytes | None, int]:
    """Decode an application property's value to (type letter, text, where the next value starts).

    A value without a readable text (part 3.2.5 allows simple types only, but peers send others) has the letter
    `UNREADABLE_TYPE`; it is stored only in the sections header. Raises DecodeError.
    """
    quick = FIXED.get(data[at])
    if quick is not None:
        letter, size, convert = quick
        after = at + 1 + size
        if after > end:
            raise DecodeError("a property ends too early")
        return letter, convert(data[at + 1 : after]), after
    known = _TEXTS.get(data[at])
    if known is None:
        if data[at] == 0x73:
            value, after = decode(data, at, end)
            if not isinstance(value, Raw):
                return "c", value.value.encode(), after
        return UNREADABLE_TYPE, None, skip(data, at, end)
    value, after = decode(data, at, end)
    return known[0], known[1](value), after


def _bounded(bits: int, signed: bool, encode: Callable[[int], bytes]) -> Callable[[str], bytes]:
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)

    def convert(text: str) -> bytes:
        number = int(text)
        if not low <= number < high:
            raise ValueError(text)
        return encode(number)

    return convert


def _float_value(text: str) -> bytes:
    value = float(text)
    packed = primitives.float_value(value)
    if math.isinf(value) != math.isinf(primitives.decode(packed, 0, len(packed))[0]):
        raise ValueError(text)
    return packed


def _boolean_value(text: str) -> bytes:
    return {"true": primitives.TRUE, "false": primitives.FALSE}[text]


_VALUES: Final[dict[str, Callable[[str], bytes]]] = {
    "b": _boolean_value,
    "B": _bounded(8, False, primitives.ubyte), "H": _bounded(16, False, primitives.ushort),
    "I": _bounded(32, False, primitives.uint), "L": _bounded(64, False, primitives.ulong),
    "g": _bounded(8, True, primitives.byte), "h": _bounded(16, True, primitives.short),
    "i": _bounded(32, True, primitives.integer), "l": _bounded(64, True, primitives.long),
    "f": _float_value, "d": lambda text: primitives.double(float(text)),
    "t": _bounded(64, True, lambda number: primitives.timestamp(Timestamp(number))),
    "u": lambda text: primitives.uuid_value(uuid.UUID(text)),
    "y": primitives.symbol, "c": primitives.char, STRING_TYPE: primitives.string,
}  # fmt: skip


def property_value(letter: str | None, text: bytes | None) -> bytes:
    """Encode a header's value in the letter's type; if that fails, as a string if it is UTF-8, else as a binary."""
    if text is None:
        return primitives.NULL
    if letter == "x":
        return primitives.binary(text)
    convert = _VALUES.get(letter) if letter is not None else None
    if convert is not None:
        try:
            return convert(text.decode())
        except (ValueError, KeyError, OverflowError, TypeError):
            pass  # another producer changed the header: keep its text, ignore the type
    return text_or_binary(text)
