"""A retained message in memory: packed, since there may be millions of them.

A message costs its topic (as text), its payload and headers (packed into one bytes object), and about 400 bytes for
Python's objects and the trie (`ENTRY_BYTES` allows for more). The form for subscribers is built on demand.
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from mapping.mqtt.outgoing import expiry_of
from mapping.record import EXPIRY, GW_OWNER, MQTT_RETAIN, MQTT_TOPIC, Headers, Record

ENTRY_BYTES: Final = 500
"""Bytes counted for a message in addition to its topic, payload and headers."""

_DROPPED: Final = frozenset(
    {MQTT_TOPIC, MQTT_RETAIN, GW_OWNER}
)  # implied by the key, the topic and `RetainedEntry.owner`
_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.Decoder(tuple[bytes, Headers]).decode


class RetainedEntry(msgspec.Struct, gc=False):
    """One retained message."""

    partition: int
    offset: int  # together with the partition its version
    timestamp: int
    expires: int | None  # epoch milliseconds after which it must not be delivered
    packed: bytes
    owner: str = ""  # the principal that it counts for; "" if unknown

    @classmethod
    def of(cls, partition: int, offset: int, timestamp: int, value: bytes, headers: Headers) -> RetainedEntry:
        """Create the entry of a record with this payload."""
        packed = _pack((value, tuple(header for header in headers if header[0] not in _DROPPED)))
        expiries = [value for name, value in headers if name == EXPIRY and value is not None]
        # the last one counts, as in `from_record`
        owner = next((value for name, value in headers if name == GW_OWNER and value is not None), b"")
        expires = expiry_of(expiries[-1] if expiries else None)
        return cls(partition, offset, timestamp, expires, packed, sys.intern(owner.decode("utf-8", "replace")))

    def content(self) -> tuple[bytes, Headers]:
        """Return the payload, and the headers except those that key and topic imply."""
        return _unpack(self.packed)

    def is_over(self, now: int) -> bool:
        """Whether the message has expired."""
        return self.expires is not None and self.expires <= now

    def size(self, name: str) -> int:
        """Return the bytes counted for the message; `name` is its MQTT topic."""
        return ENTRY_BYTES + len(name) + len(self.packed)


def content_bytes(record: Record) -> int:
    """Return the size of a record's value and headers, in bytes."""
    return len(record.value or b"") + sum(len(name) + len(value or b"") for name, value in record.headers)
