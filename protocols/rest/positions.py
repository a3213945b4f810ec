"""Positions in a topic as clients see them: a position has the next offset of each partition.

`0:12,1:40` is behind offset 11 of partition 0 and offset 39 of partition 1. An event's `id` and the parameter `from`
are positions. A partition that is missing in a position is newer than it, and is read from its first record.
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
PARTITIONS_LIMIT: Final = 100_000  # of one position; more than a topic has in practice

Position = Mapping[int, int]
"""By partition, the offset of the next record."""


class WantedPosition(msgspec.Struct, frozen=True, gc=False):
    """Where to start: at most one of `edge`, `position` and `timestamp` is set."""

    edge: str | None = None  # `BEGINNING` or `END`
    position: Position | None = None  # partitions that it leaves out start with their first record
    timestamp: int | None = None  # start with the first records that are not older; ms since the epoch
    partition: int | None = None  # read only this partition


def parse_position(text: str, where: str) -> dict[int, int]:
    """Parse a position; RestError 422; `where` names the parameter or field in error texts."""
    position: dict[int, int] = {}
    if text:
        parts = text.split(",")
        if len(parts) > PARTITIONS_LIMIT:
            raise unprocessable(f"It has too many partitions - at {where}")
        for part in parts:
            partition, colon, offset = part.partition(":")
            index, next_offset = _number(partition, LARGEST_PARTITION), _number(offset, LARGEST_OFFSET)
            if not colon or index is None or next_offset is None or index in position:
                raise unprocessable(f"It is not a position such as `0:12,1:40` - at {where}")
            position[index] = next_offset
    return position


def format_position(position: Position) -> str:
    """Format a position, sorted by partition."""
    return ",".join([f"{partition}:{offset}" for partition, offset in sorted(position.items())])


def wanted(given: Mapping[str, Any], last_event_id: str | None = None) -> WantedPosition:
    """Return where a client wants to start, from the parameters `from`, `offset`, `timestamp` and `partition`.

    The header field `last_event_id` takes precedence, since a browser sends it when it reconnects.

    Raises:
        RestError: 422 if they exclude each other or are not valid.
    """
    partition = given.get("partition")
    if last_event_id:
        return WantedPosition(position=parse_position(last_event_id, "the field Last-Event-ID"), partition=partition)
    named = [name for name in ("from", "offset", "timestamp") if name in given]
    if len(named) > 1:
        raise unprocessable(f"{' and '.join(named)} exclude each other - at query parameter `{named[1]}`")
    if "timestamp" in given:
        return WantedPosition(timestamp=given["timestamp"], partition=partition)
    if "offset" in given:
        if partition is None:
            raise unprocessable("An offset needs a partition - at query parameter `offset`")
        return WantedPosition(position={partition: given["offset"]}, partition=partition)
    text = given.get("from")
    if text is None or text in (BEGINNING, END):
        return WantedPosition(edge=text, partition=partition)
    return WantedPosition(position=parse_position(text, "`from`"), partition=partition)


def beyond_end(partition: int, offset: int, end: int) -> RestError:
    """416: the position is beyond the end of the log (RFC 9110 section 15.5.17)."""
    return RestError(416, f"There is no offset {offset} in partition {partition}: it ends at {end}")


def _number(text: str, largest: int) -> int | None:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    number = int(text)
    return number if number <= largest else None
