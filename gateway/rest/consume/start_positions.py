"""Where a reader over HTTP begins: what it asks for as offsets, one for each partition."""

from __future__ import annotations

import msgspec

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome
from protocols.rest.errors import RestError
from protocols.rest.positions import BEGINNING, Wanted, beyond_end


class Span(msgspec.Struct, frozen=True):
    """A part of the log: by partition the offset to begin at, and the end of the log when it was asked for.

    A partition that nobody leads has no end; it begins where the client has said, or at 0.
    """

    start: dict[int, int]
    ends: dict[int, int]


async def find_span(lookup: Lookup, topic: str, wanted: Wanted, default: str) -> Span:
    """The offsets that `wanted` means; `default` is `BEGINNING` or `END`, where it names no start.

    Raises:
        Refused: the topic or partition is unknown, or Kafka does not answer.
        RestError: 416, the log does not have the position.
    """
    partitions = await lookup.partitions(topic)
    if wanted.partition is not None:
        partitions = tuple(one for one in partitions if one.partition == wanted.partition)
        if not partitions:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"Topic {topic} has no partition {wanted.partition}")
    # The ends come first: what is stored during the next question lies behind them.
    timed = wanted.timestamp is not None  # only who leads a partition can tell
    found = await lookup.ends(partitions, led=not timed) or await lookup.ends(partitions)
    ends = {one.partition: end for one, end in found.items()}
    if wanted.position is not None:
        there = {one.partition for one in partitions}
        for partition, offset in wanted.position.items():
            if offset > ends.get(partition, offset):
                raise beyond_end(partition, offset, ends[partition])
            if partition not in there and wanted.partition is None:
                raise RestError(416, f"Topic {topic} has no partition {partition}")
        start = {partition: wanted.position[partition] for partition in there if partition in wanted.position}
        newer = [one for one in partitions if one.partition not in start]
        if newer:
            firsts = dict.fromkeys(newer, 0) | await lookup.beginnings(newer, led=True)
            start |= {one.partition: first for one, first in firsts.items()}
        return Span(start, ends)
    if wanted.timestamp is not None:
        found = found | await lookup.since(partitions, wanted.timestamp)
    elif (wanted.edge or default) == BEGINNING:
        found = dict.fromkeys(partitions, 0) | await lookup.beginnings(partitions, led=True)
    return Span({one.partition: offset for one, offset in found.items()}, ends)
