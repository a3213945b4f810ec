"""The partition of a key in Python, as `gateway/kafka/publish/_native.c` chooses it."""

from __future__ import annotations

import struct
from typing import Any, Final

from gateway.kafka.publish.partitioner import Accepted
from mapping.record import Record

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the unsigned 32-bit hash of `data`."""
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
    """See `gateway/kafka/publish/_native.pyi`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def by_partition(
    records: list[Record],
    tokens: list[Any],  # parallel to `records`
    start: int,  # index of the first record, which exists
    accepted: Accepted,
    /,
) -> tuple[int, dict[int, tuple[list[Record], list[Any]]]]:
    """See `gateway/kafka/publish/_native.pyi`."""
    parts: dict[int, tuple[list[Record], list[Any]]] = {}
    topic = records[start].topic
    for record, token in zip(records[start:], tokens[start:], strict=False):
        if record.topic != topic or record.partition is not None or len(record.headers) > accepted.headers:
            break
        if record.timestamp is not None and not accepted.oldest <= record.timestamp <= accepted.latest:
            break
        number = accepted.keyless if record.key is None else partition_of(record.key, accepted.partitions)
        if number < 0:
            break
        theirs, beside = parts.setdefault(number, ([], []))
        theirs.append(record)
        beside.append(token)
        start += 1
    return start, parts
