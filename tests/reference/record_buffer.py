"""Records of a Kafka batch (message format 2) in Python, as `gateway/kafka/publish/_native.c` encodes them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Final

from gateway.kafka.driver.wire import unsigned
from mapping.record import LARGEST_TIMESTAMP, Record

Headers = Sequence[tuple[str, bytes | None]]

_NULL: Final = b"\x01"  # the length -1
_LONGEST: Final = 2**31 - 1


def varint(value: int) -> bytes:
    """Encode a signed varint (zig-zag), as in Protocol Buffers."""
    return unsigned(value << 1 if value >= 0 else (-value << 1) - 1)


def _sized(content: bytes | None) -> tuple[bytes, bytes]:
    """Return an encoded length and the content."""
    return (_NULL, b"") if content is None else (varint(len(content)), content)


class RecordBuffer:
    """See `gateway/kafka/publish/_native.pyi`."""

    __slots__ = ("_limit", "_out", "count", "first", "last")

    def __init__(self, out: bytearray, limit: int) -> None:
        self._out = out
        self._limit = limit
        self.count = 0
        self.first = 0
        self.last = 0

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers, /) -> int:
        first = self.first if self.count else timestamp
        distance = timestamp - first
        if not (-LARGEST_TIMESTAMP <= timestamp <= LARGEST_TIMESTAMP and -(2**63) <= distance <= LARGEST_TIMESTAMP):
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
        count = size = 0
        rest = itertools.islice(records, start, None)
        with contextlib.suppress(OverflowError, UnicodeEncodeError, TypeError, BufferError, MemoryError):
            for record in rest:
                stamp = timestamp if record.timestamp is None else record.timestamp
                written = self.append(stamp, record.key, record.value, record.headers)
                if not written:
                    break
                count += 1
                size += written
                if size >= most:
                    break
        return count, size
