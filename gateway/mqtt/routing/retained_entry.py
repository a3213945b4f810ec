"""A retained message as it is kept in memory: packed, since there may be millions of them.

A message costs its topic (as text) and its payload and headers (packed, one bytes object), and about 400 bytes for
Python's objects and the trie (`ENTRY_BYTES` allows for more); what a subscriber gets is built when it is asked for, and
not kept.
"""

from __future__ import annotations

from typing import Final

import msgspec

from mapping.record import EXPIRY, MQTT_RETAIN, MQTT_TOPIC, Headers, Record

ENTRY_BYTES: Final = 500
"""What a message is counted for beside its topic, payload and headers."""

_EXPIRY_DIGITS: Final = 15
_DROPPED: Final = frozenset({MQTT_TOPIC, MQTT_RETAIN})  # the key says it, the topic says it
_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.Decoder(tuple[bytes, Headers]).decode


class Entry(msgspec.Struct, gc=False):
    """One message."""

    partition: int
    offset: int  # with the partition its version
    timestamp: int
    expires: int | None  # epoch milliseconds after which it must not be delivered
    packed: bytes

    @classmethod
    def of(cls, partition: int, offset: int, timestamp: int, value: bytes, headers: Headers) -> Entry:
        """The entry of a record with this payload."""
        packed = _pack((value, tuple(header for header in headers if header[0] not in _DROPPED)))
        return cls(partition, offset, timestamp, _expiry(headers), packed)

    def content(self) -> tuple[bytes, Headers]:
        """Its payload, and its headers without those that its key says."""
        return _unpack(self.packed)

    def is_over(self, now: int) -> bool:
        """Whether its time has run out."""
        return self.expires is not None and self.expires <= now

    def size(self, name: str) -> int:
        """What it counts for, in bytes, under its MQTT topic."""
        return ENTRY_BYTES + len(name) + len(self.packed)


def content_bytes(record: Record) -> int:
    """The bytes of a record's value and headers."""
    return len(record.value or b"") + sum(len(name) + len(value or b"") for name, value in record.headers)


def _expiry(headers: Headers) -> int | None:
    """As `mapping` reads it: the last header of the name counts."""
    found = None
    for name, value in headers:
        if name == EXPIRY and value is not None:
            found = value
    return int(found) if found is not None and found.isdigit() and len(found) <= _EXPIRY_DIGITS else None
