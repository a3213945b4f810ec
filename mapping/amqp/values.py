"""Converting AMQP values to readable header text, and back.

Message and correlation ids have four types in AMQP (part 3.2.4) and one in Kafka: a string is stored without a prefix,
the others with the prefixes of Qpid JMS. The types of application properties are stored in `amqp.types`, one letter per
property.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any, Final

from mapping.record import own_name, stored_name
from protocols.amqp import primitives
from protocols.amqp.primitives import DecodeError, Described, Raw, decode, skip

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


def id_text(value: Any, code: int) -> bytes:
    """Return a message or correlation id, which was decoded from constructor `code`, as text. Raises DecodeError."""
    if type(value) is str:
        raw = value.encode()
        return STRING_ID + raw if raw.startswith(ID_PREFIX) else raw
    if type(value) is bytes:
        return BINARY_ID + value.hex().encode()
    if type(value) is uuid.UUID:
        return UUID_ID + str(value).encode()
    if code in _ULONG_CODES:
        return ULONG_ID + str(value).encode()
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


def header_name(name: str) -> str:
    """Return the header name for an application property's name."""
    if name.startswith(CLOUD_EVENTS):
        return CLOUD_EVENTS_KAFKA + name[len(CLOUD_EVENTS[0]) :]
    return stored_name(name)


def property_name(stored: str) -> str | None:
    """Return the application property's name for a header's name; None when the header is one of the gateway's."""
    if stored.startswith(CLOUD_EVENTS_KAFKA) and len(stored) > len(CLOUD_EVENTS_KAFKA):
        return CLOUD_EVENTS[0] + stored[len(CLOUD_EVENTS_KAFKA) :]
    return own_name(stored)


_LETTERS: Final = {
    0x40: NULL_TYPE, 0x41: "b", 0x42: "b", 0x56: "b",
    0x50: "B", 0x60: "H", 0x70: "I", 0x52: "I", 0x43: "I", 0x80: "L", 0x53: "L", 0x44: "L",
    0x51: "g", 0x61: "h", 0x71: "i", 0x54: "i", 0x81: "l", 0x55: "l",
    0x72: "f", 0x82: "d", 0x73: "c", 0x83: "t", 0x98: "u",
    0xA0: "x", 0xB0: "x", 0xA1: STRING_TYPE, 0xB1: STRING_TYPE, 0xA3: "y", 0xB3: "y",
}  # fmt: skip
"""The letters of the types that have a readable text, by constructor."""


def property_text(data: bytes, at: int, end: int) -> tuple[str, bytes | None, int]:
    """Decode an application property's value to (type letter, text, where the next value starts).

    A value without a readable text (part 3.2.5 allows simple types only, but peers send others) has the letter
    `UNREADABLE_TYPE`; it is stored only in the sections header. Raises DecodeError.
    """
    letter = _LETTERS.get(data[at]) if at < end else None
    if letter is None:
        return UNREADABLE_TYPE, None, skip(data, at, end)
    value, after = decode(data, at, end)
    if isinstance(value, Raw):
        return UNREADABLE_TYPE, None, after
    if value is None or isinstance(value, bytes):
        return letter, value, after
    if isinstance(value, bool):
        return letter, b"true" if value else b"false", after
    return letter, str(value.value if isinstance(value, Described) else value).encode(), after


def _whole(encode: Callable[[int], bytes]) -> Callable[[str], bytes]:
    return lambda text: encode(int(text))


_VALUES: Final[dict[str, Callable[[str], bytes]]] = {
    "b": {"true": primitives.TRUE, "false": primitives.FALSE}.__getitem__,
    "B": _whole(primitives.ubyte), "H": _whole(primitives.ushort),
    "I": _whole(primitives.uint), "L": _whole(primitives.ulong),
    "g": _whole(primitives.byte), "h": _whole(primitives.short),
    "i": _whole(primitives.integer), "l": _whole(primitives.long),
    "f": lambda text: primitives.float_value(float(text)), "d": lambda text: primitives.double(float(text)),
    "t": _whole(primitives.timestamp),
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
        except (ValueError, KeyError, OverflowError, TypeError, struct.error):
            pass  # another producer changed the header: keep its text, ignore the type
    return text_or_binary(text)
