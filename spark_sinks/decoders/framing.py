"""Confluent's header before a serialized value: a zero byte and the schema id, four bytes, big-endian.

For Protobuf, the path of the message in its file follows: the number of indexes, then the indexes, as zigzag varints. A
single zero is short for the first message.
"""

from __future__ import annotations

from typing import Final

from spark_sinks.decoders.values import ReadingFault

LENGTH: Final = 5
NO_HEADER: Final = "the value has no Confluent header"
MOST_INDEXES: Final = 32


def unframed(value: bytes, schema_id: int | None, *, indexes: bool = False) -> bytes:
    """Return the value after its header; `ReadingFault` if there is none, or it has another schema id.

    Args:
        value: the value with its header.
        schema_id: the required id. None accepts any.
        indexes: whether Protobuf's message indexes follow.
    """
    if len(value) < LENGTH or value[0] != 0:
        raise ReadingFault(NO_HEADER)
    number = int.from_bytes(value[1:LENGTH], "big")
    if schema_id is not None and number != schema_id:
        raise ReadingFault(wrong_schema(schema_id) % number)
    return value[_after_indexes(value) :] if indexes else value[LENGTH:]


def wrong_schema(schema_id: int) -> str:
    """Return the error for another schema id, with a placeholder (`%s`) for the found one."""
    return f"the value was written with schema %s, not {schema_id}"


def _after_indexes(value: bytes) -> int:
    count, at = _varint(value, LENGTH)
    if count < 0 or count > MOST_INDEXES:
        raise ReadingFault(NO_HEADER)
    for _ in range(count):
        _, at = _varint(value, at)
    return at


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """Read a 32-bit zigzag varint; return it and the position after it."""
    number = 0
    for shift in range(0, 35, 7):
        if at >= len(value):
            break
        number |= (value[at] & 0x7F) << shift
        at += 1
        if value[at - 1] < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise ReadingFault(NO_HEADER)
