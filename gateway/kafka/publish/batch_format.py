"""A record batch as Kafka stores it (message format 2), written for records that follow others of their kind.

aiokafka's compiled builder writes every header of every record anew, which is most of what a record costs. Here the
key and the headers are written once for all records in a row that have the very same objects, as the publishes of
one client to one topic do. The bytes are the same (tested against aiokafka's).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Final

from aiokafka.record.util import calc_crc32c

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length, leader epoch, magic, checksum, attributes, last offset delta, first and last timestamp,
producer id and epoch, base sequence, number of records."""

_MAGIC: Final = 2
_BEHIND_LENGTH: Final = 12  # what the batch's own length does not count
_CHECKED_FROM: Final = 21  # the checksum covers all from the attributes on
_CHECKSUM_AT: Final = 17
_NULL: Final = b"\x01"  # the length -1
_LARGEST: Final = 2**63 - 1


def varint(value: int) -> bytes:
    """A signed integer of variable length, zig-zag, as in Protocol Buffers."""
    left = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


_SHORT: Final = {value: varint(value) for value in range(8192)}  # all of one or two bytes that are not negative
_ATTRIBUTES_AND_TIME: Final = {value: b"\0" + varint(value) for value in range(-1024, 8192)}
"""By milliseconds since the batch's first record; clients that say themselves when it was are a little behind, too."""
_NAMES: Final[dict[str, bytes]] = {}
_NAMES_LIMIT: Final = 1024


class Records:
    """The records of one batch; see `gateway.kafka.publish.batch.Batch`, which makes it what aiokafka takes."""

    __slots__ = (
        "_first", "_header_part", "_headers", "_key", "_key_part", "_last", "_limit", "_out", "_state", "count",
    )  # fmt: skip

    def __init__(self, limit: int) -> None:
        """`limit` in bytes, the batch's header included; the first record always fits."""
        self._limit = limit
        self._out = bytearray(HEADER.size)
        self._first = 0
        self._last = 0
        self._key: bytes | None = None
        self._headers: Sequence[tuple[str, bytes | None]] = ()
        self._key_part = _NULL
        self._header_part = _SHORT[0]
        self._state = (-1, -1, 0)
        self.count = 0  # records in it

    def append(
        self, timestamp: int, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> int:
        """Write a record; `headers` must not be changed afterwards.

        Returns:
            Its size in bytes; 0 when the batch is full, and it was not written.

        Raises:
            UnicodeEncodeError: a header's name has no UTF-8 form.
            OverflowError: the timestamp (milliseconds) has no 64 bits.
        """
        if headers is not self._headers or key is not self._key:
            self._prepare(key, headers)
        count = self.count
        if not count:
            if not -_LARGEST <= timestamp <= _LARGEST:
                raise OverflowError(f"timestamp {timestamp}")
            self._first = self._last = timestamp
        try:
            body = b"".join(
                (
                    _ATTRIBUTES_AND_TIME[timestamp - self._first],
                    _SHORT[count],
                    self._key_part,
                    _SHORT[len(value)],  # type: ignore[arg-type]  # None is rare: see below
                    value,
                    self._header_part,
                )
            )
            head = _SHORT[len(body)]
        except (KeyError, TypeError):
            head, body = self._long(timestamp, value)
        size = len(head) + len(body)
        out = self._out
        if count and len(out) + size > self._limit:
            return 0
        out += head
        out += body
        if timestamp > self._last:  # noqa: PLR1730 - a call costs on the hot path
            self._last = timestamp
        self.count = count + 1
        return size

    def append_run(  # noqa: PLR0917 - as `append`, and where in the values
        self,
        timestamp: int,  # as `append`
        key: bytes | None,  # as `append`
        values: Sequence[bytes],  # theirs
        headers: Sequence[tuple[str, bytes | None]],  # as `append`
        first: int,  # where in `values` to begin
        most: int,  # bytes to write at the most, except that the last record may reach beyond
    ) -> tuple[int, int]:
        """Write records that differ in their values only, behind another one: as `append` for each, in one loop.

        Returns:
            How many were written, and their size in bytes; the next one does not fit into the batch, has no
            usual form, or `most` is reached: try the next one with `append`.
        """
        count = self.count
        moment = _ATTRIBUTES_AND_TIME.get(timestamp - self._first)
        if not count or moment is None:
            return 0, 0
        if headers is not self._headers or key is not self._key:
            self._prepare(key, headers)
        key_part, header_part = self._key_part, self._header_part
        common = len(moment) + len(key_part) + len(header_part)
        space = self._limit - len(self._out)
        short = _SHORT
        parts: list[bytes] = []
        size = 0
        try:
            for value in itertools.islice(values, first, None):
                length = short[len(value)]
                number = short[count]
                body = common + len(number) + len(length) + len(value)
                head = short[body]
                body += len(head) + size
                if body > space:
                    break
                size = body
                count += 1
                parts += (head, moment, number, key_part, length, value, header_part)
                if size >= most:
                    break
        except KeyError:
            pass  # one of an unusual form
        self._out += b"".join(parts)
        if timestamp > self._last:  # noqa: PLR1730 - as in `append`
            self._last = timestamp
        written = count - self.count
        self.count = count
        return written, size

    def _prepare(self, key: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> None:
        if headers is not self._headers:
            self._header_part = _usual_headers(headers) or _encode_headers(headers)
        self._key_part = _NULL if key is None else (_SHORT.get(len(key)) or varint(len(key))) + key
        self._key, self._headers = key, headers

    def _long(self, timestamp: int, value: bytes | None) -> tuple[bytes, bytes]:
        """A record that some short form does not hold: null, long, far along, or far in time from the first."""
        if not -_LARGEST <= timestamp <= _LARGEST:
            raise OverflowError(f"timestamp {timestamp}")
        content = _NULL if value is None else varint(len(value)) + value
        body = b"".join(
            (b"\0", varint(timestamp - self._first), varint(self.count), self._key_part, content, self._header_part)
        )
        return varint(len(body)), body

    def size(self) -> int:
        """Bytes so far, with the batch's header."""
        return len(self._out)

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """The idempotent producer's place for the batch."""
        self._state = (producer_id, producer_epoch, base_sequence)

    def build(self) -> bytearray:
        """The batch as it goes to the broker; nothing may be written any more."""
        out = self._out
        HEADER.pack_into(
            out, 0, 0, len(out) - _BEHIND_LENGTH, -1, _MAGIC, 0, 0, self.count - 1, self._first, self._last,
            *self._state, self.count,
        )  # fmt: skip
        with memoryview(out) as view:
            checksum = calc_crc32c(view[_CHECKED_FROM:])
        struct.pack_into(">I", out, _CHECKSUM_AT, checksum)
        return out


def _usual_headers(headers: Sequence[tuple[str, bytes | None]]) -> bytes | None:
    """The headers of a record as Kafka stores them; None when a name is new, or a value null or of 8 KiB and more."""
    if not headers:
        return _SHORT[0]
    names, contents = zip(*headers, strict=True)
    try:
        sizes = map(_SHORT.__getitem__, map(len, contents))
        parts = itertools.chain.from_iterable(zip(map(_NAMES.__getitem__, names), sizes, contents, strict=True))
        return _SHORT[len(headers)] + b"".join(parts)
    except (KeyError, TypeError):
        return None


def _encode_headers(headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    """The same for any headers."""
    out = bytearray(varint(len(headers)))
    for name, content in headers:
        out += _NAMES.get(name) or _encode_name(name)
        if content is None:
            out += _NULL
        else:
            out += varint(len(content))
            out += content
    return bytes(out)


def _encode_name(name: str) -> bytes:
    raw = name.encode()
    encoded = varint(len(raw)) + raw
    if len(_NAMES) < _NAMES_LIMIT:
        _NAMES[name] = encoded
    return encoded
