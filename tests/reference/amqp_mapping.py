"""Runs of AMQP messages mapped one by one in Python, as `mapping/amqp/_native.c` maps them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mapping.amqp.fields import AmqpDestination
from mapping.amqp.incoming import to_record
from mapping.amqp.outgoing import from_record
from mapping.record import Received, Record


def to_records(
    messages: list[bytes], first: int, destination: AmqpDestination, now_ms: int, records: list[Record], /
) -> None:
    """Map the messages from index `first` on, as `to_record` does, and append them to `records`.

    Raises:
        Unmappable: the message after those appended cannot be mapped.
    """
    rest = itertools.islice(messages, first, None)
    records.extend(to_record(data, destination, now_ms) for data in rest)  # keeps those before an error


def from_records(records: Sequence[Received], now_ms: int, delivery_count: int, most_bytes: int) -> list[bytes | None]:
    """Map the first records, at least one, like `from_record`, until the messages have `most_bytes` bytes together."""
    found: list[bytes | None] = []
    size = 0
    for record in records:
        data = from_record(record, now_ms, delivery_count)
        found.append(data)
        size += len(data or b"")
        if size >= most_bytes:
            break
    return found
