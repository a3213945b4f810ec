"""Which partition a key belongs to: the Java client's answer, so that every producer of a topic agrees.

The hash is murmur2 as `org.apache.kafka.common.utils.Utils.murmur2` computes it; tests/vectors/murmur2.json holds
what the Java client says. `_native.c` does the same, and is what `gateway.kafka.publish.partitioner` takes when it can.
"""

from __future__ import annotations

import struct
from typing import Final

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
