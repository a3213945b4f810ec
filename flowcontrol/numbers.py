"""Whole numbers as a short text, for the metadata of a committed offset.

Each number is a varint (LEB128); all together are compressed with raw deflate, and encoded as base64url without
padding.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

BYTES_LIMIT: Final = 1 << 19
"""How many bytes of varints are read: a short text could unpack to far more than anyone has written."""


def pack(numbers: Iterable[int]) -> str:
    """Encode numbers from 0 on."""
    data = bytearray()
    for number in numbers:
        rest = number
        while rest > 0x7F:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
    deflate = zlib.compressobj(4, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = deflate.compress(bytes(data)) + deflate.flush()
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def unpack(text: str) -> Iterator[int] | None:
    """Decode numbers; a truncated last one is left out, an overlong one gives -1. None: the text is no such text."""
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, BYTES_LIMIT)
    except (zlib.error, binascii.Error, ValueError):
        return None
    return _varints(data)


def _varints(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0
        elif shift > 63:
            yield -1
            return
