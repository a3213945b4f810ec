"""A record batch as Kafka stores it (message format 2): the records with their header.

The bytes are those of aiokafka's own builder, which takes several times as long for a record.
"""

from __future__ import annotations

import struct
from typing import Final

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


class Records:
    """The records of one batch; see `gateway.kafka.publish.batch.Batch`, which makes it what aiokafka takes.

    Attributes:
        append, append_records: those of its `RecordBuffer`.
    """

    __slots__ = ("_buffer", "_out", "_state", "append", "append_records")

    def __init__(self, limit: int) -> None:
        """`limit` in bytes, the batch's header included; the first record always fits."""
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
        """Bytes so far, with the batch's header."""
        return len(self._out)

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """The idempotent producer's place for the batch."""
        self._state = (producer_id, producer_epoch, base_sequence)

    def build(self) -> bytearray:
        """The batch as it goes to the broker; nothing may be written any more."""
        out, records = self._out, self._buffer
        HEADER.pack_into(
            out, 0, 0, len(out) - _BEHIND_LENGTH, -1, _MAGIC, 0, 0, records.count - 1, records.first, records.last,
            *self._state, records.count,
        )  # fmt: skip
        with memoryview(out) as view:
            checksum = calc_crc32c(view[_CHECKED_FROM:])
        struct.pack_into(">I", out, _CHECKSUM_AT, checksum)
        return out
