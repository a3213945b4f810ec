"""Records one behind another, as a batch of Kafka holds them (message format 2).

This is the reference, and what runs where no C extension was built: `_native.c` does the same, some twenty times as
fast, and is what `gateway.kafka.publish.batch_format` takes when it can (ADR 0057).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Final

from gateway.kafka.driver.wire import unsigned
from mapping.record import Record

Headers = Sequence[tuple[str, bytes | None]]

_NULL: Final = b"\x01"  # the length -1
_LARGEST: Final = 2**63 - 1
_LONGEST: Final = 2**31 - 1


def varint(value: int) -> bytes:
    """A signed integer of variable length, zig-zag, as in Protocol Buffers."""
    return unsigned(value << 1 if value >= 0 else (-value << 1) - 1)


def _sized(content: bytes | None) -> tuple[bytes, bytes]:
    """Bytes, and before them how many they are."""
    return (_NULL, b"") if content is None else (varint(len(content)), content)


class RecordBuffer:
    """Writes records behind what is in a bytearray.

    Attributes:
        count: records written.
        first: timestamp of the first one; the others are told by their distance from it.
        last: the latest timestamp of all.
    """

    __slots__ = ("_limit", "_out", "count", "first", "last")

    def __init__(self, out: bytearray, limit: int) -> None:
        """`limit`: bytes that `out` may have; the first record always fits. No other may change its size meanwhile."""
        self._out = out
        self._limit = limit
        self.count = 0
        self.first = 0
        self.last = 0

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers, /) -> int:
        """Write a record.

        Returns:
            Its size in bytes; 0 when there is no space for it, and it was not written.

        Raises:
            OverflowError: the timestamp (milliseconds), or its distance from the first one, has no 64 bits, or the
                record's length no 32.
            UnicodeEncodeError: a header's name has no UTF-8 form.
        """
        first = self.first if self.count else timestamp
        distance = timestamp - first
        if not (-_LARGEST <= timestamp <= _LARGEST and -_LARGEST - 1 <= distance <= _LARGEST):
            raise OverflowError(f"timestamp {timestamp}")
        parts = [b"\0", varint(distance), varint(self.count), *_sized(key), *_sized(value), varint(len(headers))]
        for name, content in headers:
            parts += (*_sized(name.encode()), *_sized(content))
        length = sum(map(len, parts))
        if length > _LONGEST:
            raise OverflowError(f"a record of more than {_LONGEST} bytes")
        head = varint(length)
        size = len(head) + length
        if self.count and len(self._out) + size > self._limit:
            return 0
        self._out += b"".join((head, *parts))
        self.last = max(self.last, timestamp) if self.count else timestamp
        self.first = first
        self.count += 1
        return size

    def append_records(self, timestamp: int, records: list[Record], start: int, most: int, /) -> tuple[int, int]:
        """Write records from `start` on, each with its key, value and headers: as `append` for each.

        `most`: bytes to write at the most, except that the last record may reach beyond.

        Returns:
            How many were written, and their size in bytes; then `most` is reached, or the next one does not fit or
            cannot be written: `append` tells.
        """
        count = size = 0
        rest = itertools.islice(records, start, None)
        with contextlib.suppress(OverflowError, UnicodeEncodeError, TypeError, BufferError, MemoryError):
            for record in rest:
                written = self.append(timestamp, record.key, record.value, record.headers)
                if not written:
                    break
                count += 1
                size += written
                if size >= most:
                    break
        return count, size
