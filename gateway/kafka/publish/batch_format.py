"""A record batch in Kafka's storage format (message format 2): header and records, compressed or not.

The bytes are the same as those of aiokafka's own builder, which takes several times as long for a record. The records
are compressed together when the batch is sent; `RecordBuffer`, which writes them, is not involved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import cramjam
from aiokafka.record.util import calc_crc32c

from gateway.kafka.publish._native import RecordBuffer

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length, leader epoch, magic, checksum, attributes, last offset delta, first and last timestamp,
producer id and epoch, base sequence, number of records."""

_MAGIC: Final = 2
_BEHIND_LENGTH: Final = 12  # end of the length field: the batch's length counts the bytes after it
_CHECKED_FROM: Final = 21  # the checksum covers everything from the attributes on
_CHECKSUM_AT: Final = 17


class Codec(NamedTuple):
    """A compression codec."""

    code: int  # Kafka's, in a batch's attributes
    compress: Callable[[bytes], bytes]


def _lz4(records: bytes) -> bytes:
    # Independent blocks, as Kafka requires (KIP-57). The fast level: another one took twenty times as long.
    frame = cramjam.lz4.Compressor(level=1, content_checksum=False, block_linked=False)
    frame.compress(records)
    return bytes(frame.finish())


def _zstd(records: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(records, level=1))


CODECS: Final = {"none": None, "lz4": Codec(3, _lz4), "zstd": Codec(4, _zstd)}
"""Codecs by the values of `kafka.compression`."""
WORTH: Final = 256
"""Bytes of records below which a batch is not compressed."""


class Records:
    """The records of one batch, for `gateway.kafka.publish.batch.Batch`.

    Attributes:
        append, append_records: the methods of its `RecordBuffer`.
    """

    __slots__ = ("_buffer", "_codec", "_out", "_state", "append", "append_records")

    def __init__(self, limit: int, codec: Codec | None = None) -> None:
        """`limit` is in bytes before compression, including the batch's header; the first record always fits."""
        self._codec = codec
        self._out = bytearray(HEADER.size)
        self._buffer = RecordBuffer(self._out, limit)
        self.append = self._buffer.append
        self.append_records = self._buffer.append_records
        self._state = (-1, -1, 0)

    def size(self) -> int:
        """Return the bytes so far, including the batch's header, before compression."""
        return len(self._out)

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """Set the idempotent producer's id and epoch, and the sequence number of the first record."""
        self._state = (producer_id, producer_epoch, base_sequence)

    def build(self) -> bytearray:
        """Return the batch as it is sent, compressed if that makes it smaller. No record may be added afterwards."""
        out, records, codec = self._out, self._buffer, self._codec
        attributes = 0
        if codec is not None and len(out) >= HEADER.size + WORTH:
            with memoryview(out) as view:
                packed = codec.compress(bytes(view[HEADER.size :]))
            if HEADER.size + len(packed) < len(out):
                out, attributes = bytearray(HEADER.size) + packed, codec.code
        HEADER.pack_into(
            out, 0, 0, len(out) - _BEHIND_LENGTH, -1, _MAGIC, 0, attributes, records.count - 1, records.first,
            records.last, *self._state, records.count,
        )  # fmt: skip
        with memoryview(out) as view:
            checksum = calc_crc32c(view[_CHECKED_FROM:])
        struct.pack_into(">I", out, _CHECKSUM_AT, checksum)
        return out
