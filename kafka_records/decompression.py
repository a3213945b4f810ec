"""Decompresses Kafka's batches up to a bound: a native producer's 1 MB may be 1 GB.

A batch may become 64 MiB, or 32 times as large as it is. No producer makes larger ones of records; what is larger is
stepped over like all that cannot be read (ADR 0092). Producers choose the codec; the four are those of
https://kafka.apache.org/documentation/#compression.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiokafka.record.default_records
import aiokafka.record.legacy_records
import cramjam
from aiokafka.errors import CorruptRecordException

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FLOOR: Final = 64 * 1024 * 1024
RATIO: Final = 32
_LZ4_HEAD: Final = 7  # magic, flags, block size, checksum
_LZ4_BLOCKS: Final = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}
_UINT32_LE: Final = struct.Struct("<I")
_GZIP: Final = 16 + zlib.MAX_WBITS
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEAD: Final = 16
_INT32: Final = struct.Struct(">i")


class TooLargeError(CorruptRecordException):  # type: ignore[misc]  # aiokafka has no types
    """A batch is larger than the bound when it is decompressed."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"it has more than {limit} bytes when it is decompressed")


def limit_of(data: Any) -> int:
    """Return how many bytes compressed data may become."""
    return max(FLOOR, RATIO * len(data))


def gzip_decode(data: Any) -> bytes:
    """Decompress gzip (RFC 1952). Raises what zlib raises, and TooLargeError."""
    return _members(data, lambda: zlib.decompressobj(_GZIP))


def zstd_decode(data: Any) -> bytes:
    """Decompress zstd (RFC 8878). Raises what zstd raises, and TooLargeError."""
    return _members(data, zstd.ZstdDecompressor)


def _members(data: Any, new: Callable[[], Any]) -> bytes:
    """Decompress one member or frame after the other."""
    limit = limit_of(data)
    rest, parts, size = bytes(data), [], 0
    while rest:
        stream = new()
        part = stream.decompress(rest, limit - size + 1)
        size += len(part)
        if size > limit:
            raise TooLargeError(limit)
        if not stream.eof:
            raise CorruptRecordException("its compressed data are cut off")
        parts.append(part)
        rest = stream.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def lz4_decode(data: Any) -> bytes:
    """Decompress LZ4 frames. Raises what cramjam raises, and TooLargeError."""
    if _lz4_size(memoryview(data)) > limit_of(data):
        raise TooLargeError(limit_of(data))
    return bytes(cramjam.lz4.decompress(data))


def _lz4_size(view: memoryview) -> int:
    """Return how large LZ4 frames can become: all of their blocks but the last are full (LZ4 Frame Format 1.6.4)."""
    at = size = 0
    while at + _LZ4_HEAD <= len(view):
        flags, block = view[at + 4], _LZ4_BLOCKS.get(view[at + 5] >> 4 & 7, _LZ4_BLOCKS[7])
        at += _LZ4_HEAD + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)  # content size, dictionary id
        while at + 4 <= len(view):
            (length,) = _UINT32_LE.unpack_from(view, at)
            at += 4
            if not length:
                at += 4 if flags & 0x04 else 0  # the checksum of the content
                break
            at += (length & 0x7FFFFFFF) + (4 if flags & 0x10 else 0)  # the checksum of the block
            size += block
    return size


def snappy_decode(data: Any) -> bytes:
    """Decompress snappy, raw or in the blocks of the Java library. Raises what cramjam raises, and TooLargeError."""
    limit, view = limit_of(data), memoryview(data)
    if bytes(view[: len(_XERIAL)]) != _XERIAL:
        return _block(view, limit)
    parts, at, size = [], _XERIAL_HEAD, 0
    while at < len(view):
        (length,) = _INT32.unpack_from(view, at)
        at += _INT32.size
        part = _block(view[at : at + length], limit - size)
        parts.append(part)
        size += len(part)
        at += max(0, length)
    return b"".join(parts)


def _block(block: memoryview, limit: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > limit:
        raise TooLargeError(limit)
    return bytes(cramjam.snappy.decompress_raw(block))


DECODERS: Final[Mapping[int, Callable[[Any], bytes]]] = {
    0: bytes, 1: gzip_decode, 2: snappy_decode, 3: lz4_decode, 4: zstd_decode,
}  # fmt: skip
"""By the number of the codec in a batch's attributes."""


def bound_decompression() -> None:
    """Make all aiokafka consumers of this process decompress with these functions."""
    for batch in (aiokafka.record.default_records.DefaultRecordBatch, aiokafka.record.legacy_records.LegacyRecordBatch):
        module = sys.modules[batch.__module__]
        for decode in DECODERS.values():
            if hasattr(module, decode.__name__):
                setattr(module, decode.__name__, decode)
