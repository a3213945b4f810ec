"""Record batches of Kafka (message format 2) that aiokafka's parser refuses. No I/O.

A header's name is a UTF-8 string by the protocol, but Kafka stores what a producer sends, and clients in C, Go or Rust
send any bytes. aiokafka then refuses the batch. `records` reads it as the Java client does: each byte sequence that is
not UTF-8 becomes U+FFFD.

The layout is at https://kafka.apache.org/documentation/#recordbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch
from aiokafka.record.util import calc_crc32c

from kafka_records.decompression import DECODERS
from mapping.record import Header, Received

_HEADER: Final = Struct(">qiibIhiqqqhii")
_LENGTH_AT: Final = 8  # of all that follows it
_MAGIC_AT: Final = 16
_CRC_FROM: Final = 21  # the checksum is of all bytes from here on
_RECORDS_AT: Final = _HEADER.size
_LAST_DELTA_AT: Final = 23
_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")
_LONGEST_VARINT: Final = 10
_SHORTEST: Final = 26  # a batch of the format 0
MAGIC: Final = 2
CODEC_MASK: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
CONTROL: Final = 0x20
BEHIND_THE_END: Final = "its offsets are behind the end of the log"


class FetchedBatches:
    """The batches of one partition in a fetch, in place of aiokafka's `MemoryRecords`.

    That one parses a batch ahead, so what it raises may concern this batch or the next.
    """

    __slots__ = ("_at", "_data", "_end", "_size", "_view", "_whole", "last")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._view = memoryview(data)
        self._size = len(data)
        self._at = 0
        self._end = 0  # of the next batch; this and the next by `has_next`
        self._whole = False
        self.last = self._view  # the bytes of the batch that `next_batch` returned or refused

    def size_in_bytes(self) -> int:
        """Return how many bytes were fetched."""
        return self._size

    def has_next(self) -> bool:
        """Whether there is another batch. A broker cuts the last one, but always sends the first whole (KIP-74)."""
        at, size = self._at, self._size
        self._end, self._whole = size, False
        if at + _SHORTEST > size:
            return at == 0 < size
        end = at + _LENGTH_AT + _INT32.size + _INT32.unpack_from(self._data, at + _LENGTH_AT)[0]
        if at + _SHORTEST <= end <= size:
            self._end, self._whole = end, True
            return True
        return at == 0 or end <= size

    def next_batch(self) -> Any:
        """Return aiokafka's object for the batch that `has_next` has found.

        Raises:
            CorruptRecordException: its length is wrong; `last` is all that was left.
        """
        at, end = self._at, self._end
        self._at = end
        self.last = raw = self._view[at:end]
        if self._whole:
            magic = self._data[at + _MAGIC_AT]
            if magic < MAGIC:
                return LegacyRecordBatch(raw, magic)
            if end - at >= _RECORDS_AT:
                return DefaultRecordBatch(raw)
        raise CorruptRecordException("its length is wrong")


def offset_behind(batch: memoryview, offset: int, end: int) -> int:
    """Return where to read on behind a batch: the offset after its last record, if its header can be believed.

    Otherwise the next offset. `end` is the end of the log.
    """
    if len(batch) >= _LAST_DELTA_AT + _INT32.size and batch[_MAGIC_AT] == MAGIC:
        behind = _INT64.unpack_from(batch)[0] + _INT32.unpack_from(batch, _LAST_DELTA_AT)[0] + 1
        if offset < behind <= end:
            return int(behind)
    return offset + 1


def records(topic: str, partition: int, batch: memoryview, end: int, most: int) -> Iterator[Received]:
    """Yield the records of a batch, whatever bytes the names of their headers have. `end` is the end of the log.

    Of a record with more than `most` headers, one more is read.

    Raises:
        CorruptRecordException: the checksum is wrong, or the bytes are no batch of this log.
        UnsupportedCodecError: it is compressed by none of Kafka's codecs.
        Exception: as the codec raises for what it cannot decompress.
    """
    if len(batch) < _HEADER.size or batch[_MAGIC_AT] != MAGIC:
        raise CorruptRecordException("it has an unknown format")
    base, _, _, _, checksum, attributes, last, first_time, last_time, _, _, _, count = _HEADER.unpack_from(batch)
    if calc_crc32c(bytes(batch[_CRC_FROM:])) != checksum:
        raise CorruptRecordException("its checksum is wrong")
    if base + last >= end:
        raise CorruptRecordException(BEHIND_THE_END)
    if attributes & CONTROL:
        raise CorruptRecordException("it ends a transaction in an unknown way")
    codec = attributes & CODEC_MASK
    decode = DECODERS.get(codec)
    if decode is None:
        raise UnsupportedCodecError(f"it is compressed by the unknown codec {codec}")
    body = decode(batch[_RECORDS_AT:].tobytes())
    at = 0
    for _ in range(count):
        length, begin = _varint(body, at)
        at = begin + length
        if length < 0 or at > len(body):
            raise CorruptRecordException(f"a record of {length} bytes does not fit")
        delta, where = _varint(body, begin + 1)  # after the record's attributes, which are unused
        offset_delta, where = _varint(body, where)
        key, where = _bytes(body, where)
        value, where = _bytes(body, where)
        headers, where = _headers(body, where, most)
        if where != at and len(headers) <= most:
            raise CorruptRecordException(f"a record of {length} bytes is {where - begin} bytes long")
        time = last_time if attributes & LOG_APPEND_TIME else first_time + delta
        yield Received(topic, key, value, headers, time, partition, base + offset_delta)


def _headers(body: bytes, at: int, most: int) -> tuple[tuple[Header, ...], int]:
    count, at = _varint(body, at)
    if not 0 <= count <= len(body) - at:
        raise CorruptRecordException(f"a record has {count} headers")
    headers: list[Header] = []
    for _ in range(min(count, most + 1)):
        name, at = _bytes(body, at)
        if name is None:
            raise CorruptRecordException("a header has no name")
        value, at = _bytes(body, at)
        headers.append((name.decode("utf-8", "replace"), value))
    return tuple(headers), at


def _bytes(body: bytes, at: int) -> tuple[bytes | None, int]:
    length, at = _varint(body, at)
    if length < 0:
        return None, at
    if length > len(body) - at:
        raise CorruptRecordException(f"{length} bytes do not fit")
    return body[at : at + length], at + length


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Decode a signed varint; aiokafka's own function reads whatever memory is behind `body`."""
    try:
        value, size = read_unsigned(body[at : at + _LONGEST_VARINT], 0)
    except IndexError:
        raise CorruptRecordException("a number does not end") from None
    return (value >> 1) ^ -(value & 1), at + size


def read_unsigned(data: bytes, at: int) -> tuple[int, int]:
    """Decode an unsigned varint; return it with the position after it. Raises IndexError where it does not end."""
    value = shift = 0
    while (byte := data[at]) > 0x7F:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
