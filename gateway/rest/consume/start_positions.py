"""Resolves the start position that an HTTP reader requests to one offset for each partition."""

from __future__ import annotations

import msgspec

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome
from protocols.rest.errors import RestError
from protocols.rest.positions import BEGINNING, WantedPosition, beyond_end


class Span(msgspec.Struct, frozen=True):
    """A part of the log: by partition the start offset, and the log's end at the time of the query.

    A partition without a leader has no end; it starts where the client has requested, or at 0.
    """

    start: dict[int, int]
    ends: dict[int, int]


async def find_span(lookup: Lookup, topic: str, wanted: WantedPosition, default: str) -> Span:
    """Return the offsets for `wanted`; `default` is `BEGINNING` or `END` and used if `wanted` has no start.

    Raises:
        Refused: The topic or partition is unknown, or Kafka does not answer.
        RestError: 416 if the position is beyond the end of the log.
    """
    partitions = await lookup.partitions(topic)
    if wanted.partition is not None:
        partitions = tuple(place for place in partitions if place.partition == wanted.partition)
        if not partitions:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"Topic {topic} has no partition {wanted.partition}")
    # Query the ends first: records that are stored during the next query lie behind them.
    timed = wanted.timestamp is not None  # only the leader of a partition can look up a timestamp
    behind = await lookup.ends(partitions, led=not timed) or await lookup.ends(partitions)
    ends = {place.partition: end for place, end in behind.items()}
    if wanted.position is not None:
        there = {place.partition for place in partitions}
        for partition, offset in wanted.position.items():
            if offset > ends.get(partition, offset):
                raise beyond_end(partition, offset, ends[partition])
            if partition not in there and wanted.partition is None:
                raise RestError(416, f"Topic {topic} has no partition {partition}")
        start = {partition: wanted.position[partition] for partition in there if partition in wanted.position}
        newer = [place for place in partitions if place.partition not in start]
        if newer:
            firsts = dict.fromkeys(newer, 0) | await lookup.beginnings(newer, led=True)
            start |= {place.partition: first for place, first in firsts.items()}
        return Span(start, ends)
    if wanted.timestamp is not None:
        behind = behind | await lookup.since(partitions, wanted.timestamp)
    elif (wanted.edge or default) == BEGINNING:
        behind = dict.fromkeys(partitions, 0) | await lookup.beginnings(partitions, led=True)
    return Span({place.partition: offset for place, offset in behind.items()}, ends)
