"""Which partition a key belongs to: the Java client's answer, so that every producer of a topic agrees.

The hash is murmur2 as `org.apache.kafka.common.utils.Utils.murmur2` computes it; tests/vectors/murmur2.json holds
what the Java client says. In Python it costs more than appending the record does, so each topic remembers its keys.
"""

from __future__ import annotations

import struct
from typing import Final

CACHED_KEYS: Final = 10_000
"""Keys remembered per topic: about 1.5 MB with keys of 50 bytes. Forgotten together when full."""

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit hash of `data`, unsigned."""
    length = len(data)
    hashed = _SEED ^ length
    words = length >> 2
    for word in struct.unpack_from(f"<{words}I", data):
        k = (word * _M) & _MASK
        k ^= k >> 24
        hashed = ((hashed * _M) & _MASK) ^ ((k * _M) & _MASK)
    rest = data[words << 2 :]
    if rest:
        hashed = ((hashed ^ int.from_bytes(rest, "little")) * _M) & _MASK
    hashed ^= hashed >> 13
    hashed = (hashed * _M) & _MASK
    return hashed ^ (hashed >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of `key` among `partitions`, as the Java client's default partitioner chooses it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Partitioner:
    """The partitions of one topic's keys."""

    __slots__ = ("known", "partitions")

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.known: dict[bytes, int] = {}  # key to partition; read it first on the hot path, then ask `place`

    def place(self, key: bytes) -> int:
        """The partition of `key`, remembered."""
        partition = partition_of(key, self.partitions)
        if len(self.known) >= CACHED_KEYS:
            self.known.clear()
        self.known[key] = partition
        return partition
