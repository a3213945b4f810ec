"""Positions in a topic as clients see them: a position says for each partition which offset comes next.

`0:12,1:40` is behind offset 11 of partition 0 and offset 39 of partition 1. It is what an event's `id` and the
parameter `from` hold. A partition that is missing in it begins with its first record: it is newer than the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from protocols.rest.errors import RestError, unprocessable

BEGINNING: Final = "beginning"
END: Final = "end"
LARGEST_OFFSET: Final = 2**63 - 1
LARGEST_PARTITION: Final = 2**31 - 1
PARTITIONS_LIMIT: Final = 100_000  # of one position; more than Kafka likes in a topic

Position = Mapping[int, int]
"""By partition, the offset of the next record."""


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """Where to begin: one of the fields is set, or none."""

    edge: str | None = None  # `BEGINNING` or `END`
    position: Position | None = None  # a position; what it leaves out begins with the first record
    timestamp: int | None = None  # the first records that are not older, in ms since the epoch
    partition: int | None = None  # of this partition alone


def parse_position(text: str, where: str) -> dict[int, int]:
    """A position from its text; RestError: 422; `where` names what the text is of."""
    position: dict[int, int] = {}
    if text:
        parts = text.split(",")
        if len(parts) > PARTITIONS_LIMIT:
            raise unprocessable(f"It has too many partitions - at {where}")
        for part in parts:
            partition, colon, offset = part.partition(":")
            index, next_offset = _number(partition, LARGEST_PARTITION), _number(offset, LARGEST_OFFSET)
            if not colon or index is None or next_offset is None or index in position:
                raise unprocessable(f"It is no position such as `0:12,1:40` - at {where}")
            position[index] = next_offset
    return position


def format_position(position: Position) -> str:
    """The text of a position, sorted by partition."""
    return ",".join([f"{partition}:{offset}" for partition, offset in sorted(position.items())])


def wanted(given: Mapping[str, Any], last_event_id: str | None = None) -> Wanted:
    """Where a client wants to begin, by `from`, `offset`, `timestamp` and `partition` where they were given.

    The header field `last_event_id` goes before everything else, since a browser sends it when it comes back.

    Raises:
        RestError: 422, they exclude each other, or no position.
    """
    partition = given.get("partition")
    if last_event_id:
        return Wanted(position=parse_position(last_event_id, "the field Last-Event-ID"), partition=partition)
    named = [name for name in ("from", "offset", "timestamp") if name in given]
    if len(named) > 1:
        raise unprocessable(f"{' and '.join(named)} exclude each other - at query parameter `{named[1]}`")
    if "timestamp" in given:
        return Wanted(timestamp=given["timestamp"], partition=partition)
    if "offset" in given:
        if partition is None:
            raise unprocessable("An offset needs a partition - at query parameter `offset`")
        return Wanted(position={partition: given["offset"]}, partition=partition)
    text = given.get("from")
    if text is None or text in (BEGINNING, END):
        return Wanted(edge=text, partition=partition)
    return Wanted(position=parse_position(text, "`from`"), partition=partition)


def beyond_end(partition: int, offset: int, end: int) -> RestError:
    """416: a position that the log does not have (RFC 9110 section 15.5.17)."""
    return RestError(416, f"There is no offset {offset} in partition {partition}: it ends at {end}")


def _number(text: str, largest: int) -> int | None:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    number = int(text)
    return number if number <= largest else None
