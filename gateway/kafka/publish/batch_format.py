"""A record batch as Kafka stores it (message format 2): the records with their header, compressed or not.

The bytes are those of aiokafka's own builder, which takes several times as long for a record. They are
compressed together, when the batch is sent; whoever writes them (`RecordBuffer`) does not know of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import cramjam
from aiokafka.record.util import calc_crc32c

try:
    from gateway.kafka.publish._native import RecordBuffer
except ImportError:  # not built, or not wanted: `gateway.native` tells
    from gateway.kafka.publish.record_buffer import RecordBuffer

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length, leader epoch, magic, checksum, attributes, last offset delta, first and last timestamp,
producer id and epoch, base sequence, number of records."""

_MAGIC: Final = 2
_BEHIND_LENGTH: Final = 12  # what the batch's own length does not count
_CHECKED_FROM: Final = 21  # the checksum covers all from the attributes on
_CHECKSUM_AT: Final = 17


class Codec(NamedTuple):
    """A way to compress."""

    code: int  # Kafka's, in the attributes of a batch
    compress: Callable[[bytes], bytes]


def _lz4(records: bytes) -> bytes:
    # Blocks that stand alone, as Kafka wants them (KIP-57); its fast way: another level took twenty times as long.
    frame = cramjam.lz4.Compressor(level=1, content_checksum=False, block_linked=False)
    frame.compress(records)
    return bytes(frame.finish())


def _zstd(records: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(records, level=1))


CODECS: Final = {"none": None, "lz4": Codec(3, _lz4), "zstd": Codec(4, _zstd)}
"""By the names of `kafka.compression`."""
WORTH: Final = 256
"""Bytes of records below which a batch is sent as it is."""


class Records:
    """The records of one batch; see `gateway.kafka.publish.batch.Batch`, which makes it what aiokafka takes.

    Attributes:
        append, append_records: those of its `RecordBuffer`.
    """

    __slots__ = ("_buffer", "_codec", "_out", "_state", "append", "append_records")

    def __init__(self, limit: int, codec: Codec | None = None) -> None:
        """`limit` in bytes before compression, the batch's header included; the first record always fits."""
        self._codec = codec
        self._out = bytearray(HEADER.size)
        self._buffer = RecordBuffer(self._out, limit)
        self.append = self._buffer.append
        self.append_records = self._buffer.append_records
        self._state = (-1, -1, 0)

    @property
    def count(self) -> int:
        """Records in it."""
        return self._buffer.count

    def size(self) -> int:
        """Bytes so far, with the batch's header, before compression."""
        return len(self._out)

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """The idempotent producer's place for the batch."""
        self._state = (producer_id, producer_epoch, base_sequence)

    def build(self) -> bytearray:
        """The batch as it goes to the broker, compressed if that makes it smaller; nothing may be written any more."""
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
