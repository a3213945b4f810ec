"""Which partition a key belongs to: the Java client's answer, so that every producer of a topic agrees.

The hash is murmur2 as `org.apache.kafka.common.utils.Utils.murmur2` computes it; tests/vectors/murmur2.json holds
what the Java client says. `_native.c` does the same, and is what `gateway.kafka.publish.partitioner` takes when it can.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from mapping.record import Record

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


def by_partition(
    records: list[Record],
    tokens: list[Any],  # beside `records`
    start: int,  # where to begin: there is a record
    partitions: int,  # of its topic
    keyless: int,  # the partition of records without a key; -1: they have none yet
    /,
) -> tuple[int, dict[int, tuple[list[Record], list[Any]]]]:
    """Sort records of one topic by their partitions, from `start` on, in their order.

    It ends before one of another topic, with a partition or a timestamp of its own, or without a place.

    Returns:
        Where it ended, and of each partition the records and the tokens.
    """
    parts: dict[int, tuple[list[Record], list[Any]]] = {}
    topic = records[start].topic
    for record, token in zip(records[start:], tokens[start:], strict=False):
        if record.topic != topic or record.partition is not None or record.timestamp is not None:
            break
        number = keyless if record.key is None else partition_of(record.key, partitions)
        if number < 0:
            break
        theirs, beside = parts.setdefault(number, ([], []))
        theirs.append(record)
        beside.append(token)
        start += 1
    return start, parts
