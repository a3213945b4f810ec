"""Which partition a key belongs to: the Java client's answer, so that every producer of a topic agrees.

The hash is murmur2 as `org.apache.kafka.common.utils.Utils.murmur2` computes it; tests/vectors/murmur2.json holds
what the Java client says. In Python it costs more than appending the record does, so each topic remembers its keys.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
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
    tail = data[words << 2 :]
    if tail:
        hashed = ((hashed ^ int.from_bytes(tail, "little")) * _M) & _MASK
    hashed ^= hashed >> 13
    hashed = (hashed * _M) & _MASK
    return hashed ^ (hashed >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of `key` among `partitions`, as the Java client's default partitioner chooses it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Partitioner:
    """The partitions of one topic: by key when there is one, sticky when there is none.

    Attributes:
        known: key to partition; read it first on the hot path, then ask `place`.
        sticky: the partition for records without a key until `move_on` (KIP-480: fill one batch at a time).
    """

    __slots__ = ("_random", "known", "partitions", "sticky")

    def __init__(self, partitions: int, available: Sequence[int], chance: random.Random) -> None:
        self.partitions = partitions
        self._random = chance
        self.known: dict[bytes, int] = {}
        self.sticky = 0
        self.move_on(available)

    def place(self, key: bytes) -> int:
        """The partition of `key`, remembered."""
        partition = partition_of(key, self.partitions)
        if len(self.known) >= CACHED_KEYS:
            self.known.clear()
        self.known[key] = partition
        return partition

    def move_on(self, available: Sequence[int]) -> None:
        """Choose the next partition for records without a key.

        Args:
            available: partitions that have a leader; when none has, any partition will do.
        """
        choices = [number for number in available if number != self.sticky]
        if choices:
            self.sticky = self._random.choice(choices)
        elif not available:
            self.sticky = self._random.randrange(self.partitions)
        else:
            self.sticky = available[0]
