"""The header that Confluent's serializers put before a value: a zero byte and the schema's id, four bytes, big-endian.

Protobuf's has the place of the message in its file behind that: how many numbers, and the numbers, as zigzag varints;
a single zero is short for the first message.
"""

from __future__ import annotations

from typing import Final

from spark_sinks.decoders.values import Fault

LENGTH: Final = 5
NO_HEADER: Final = "the value has no Confluent header"
MOST_INDEXES: Final = 32


def unframed(value: bytes, schema_id: int | None, *, indexes: bool = False) -> bytes:
    """What follows the header; `Fault` where there is none, or one of another schema.

    Args:
        value: with the header.
        schema_id: that it must have; None: any.
        indexes: whether Protobuf's place of the message is behind it.
    """
    if len(value) < LENGTH or value[0] != 0:
        raise Fault(NO_HEADER)
    found = int.from_bytes(value[1:LENGTH], "big")
    if schema_id is not None and found != schema_id:
        raise Fault(wrong_schema(schema_id) % found)
    return value[_after_indexes(value) :] if indexes else value[LENGTH:]


def wrong_schema(schema_id: int) -> str:
    """What is said of a value with another id, with a place for it (`%s`)."""
    return f"the value was written with schema %s, not {schema_id}"


def _after_indexes(value: bytes) -> int:
    count, at = _varint(value, LENGTH)
    if count < 0 or count > MOST_INDEXES:
        raise Fault(NO_HEADER)
    for _ in range(count):
        _, at = _varint(value, at)
    return at


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint of 32 bits, and where it ends."""
    found = 0
    for shift in range(0, 35, 7):
        if at >= len(value):
            break
        found |= (value[at] & 0x7F) << shift
        at += 1
        if value[at - 1] < 0x80:
            return (found >> 1) ^ -(found & 1), at
    raise Fault(NO_HEADER)
