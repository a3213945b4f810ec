"""Finding the sections of an AMQP message (part 3.2) without decoding them.

proton's own decoding loses sections and types; here a message stays bytes, and each section is a slice of it.
"""

from __future__ import annotations

from typing import Final

from protocols.amqp.primitives import DecodeError, code_of, decode, skip

HEADER: Final = 0x70
DELIVERY_ANNOTATIONS: Final = 0x71
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
SEQUENCE: Final = 0x76
VALUE: Final = 0x77
FOOTER: Final = 0x78

_BODY: Final = frozenset({DATA, SEQUENCE, VALUE})

Section = tuple[int, int, int, int]
"""(descriptor, start, start of the value, end); the last three are offsets in the message."""


def scan(data: bytes) -> list[Section]:
    """Return the sections in order.

    Raises:
        DecodeError: a section is unknown, repeated or out of order, or its value reaches beyond the message.
    """
    sections: list[Section] = []
    at, end = 0, len(data)
    last = 0
    while at < end:
        if data[at : at + 2] == b"\x00\x53" and at + 2 < end:  # a smallulong descriptor, as all common clients write it
            code, value = data[at + 2], at + 3
        else:
            code, value = _descriptor(data, at, end)
        if not HEADER <= code <= FOOTER:
            raise DecodeError(f"no section of a message has descriptor 0x{code:x}")
        # Part 3.2: sections come in this order, each at most once. A body is one amqp-value section, or any number of
        # data sections, or any number of amqp-sequence sections.
        if code < last or (code == last and code not in (DATA, SEQUENCE)) or (last in _BODY and last < code < FOOTER):
            raise DecodeError(f"section 0x{code:x} after 0x{last:x}")
        after = skip(data, value, end)
        sections.append((code, at, value, after))
        last = code
        at = after
    return sections


def _descriptor(data: bytes, at: int, end: int) -> tuple[int, int]:
    if data[at] != 0:
        raise DecodeError("a section without a descriptor")
    descriptor, value = decode(data, at + 1, end)
    code = code_of(descriptor)
    if code is None:
        raise DecodeError("a section with an unknown descriptor")
    return code, value


def binary_at(data: bytes, at: int, end: int) -> bytes:
    """Return the binary from `at`, its constructor, to `end`. Raises DecodeError when it is no binary."""
    code = data[at]
    if code == 0xA0:
        return data[at + 2 : end]
    if code == 0xB0:
        return data[at + 5 : end]
    raise DecodeError("a data section that is not binary")
