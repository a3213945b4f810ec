"""Start positions in a topic, and their offsets."""

from __future__ import annotations

import enum

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome


class StartPosition(enum.Enum):
    """A position that every partition has."""

    BEGINNING = "beginning"  # the first record that still exists
    LAST = "last"  # the last record
    END = "end"  # the next record to be stored


class AtOffset(msgspec.Struct, frozen=True):
    """A record by its offset. Deleted records are skipped; it may be at most the end of the log."""

    offset: int


class AtTime(msgspec.Struct, frozen=True):
    """The first record with at least this timestamp, in ms since the epoch."""

    timestamp: int


class AtOffsets(msgspec.Struct, frozen=True):
    """An offset for each partition, by default the beginning; offsets outside the log move to its nearer end."""

    offsets: dict[int, int]


Start = StartPosition | AtOffset | AtTime | AtOffsets


class BeyondEnd(Exception):  # noqa: N818 - an answer, not an error
    """An offset that the log does not have yet, or no longer has since the topic was recreated."""


async def starting_offsets(lookup: Lookup, topic: str, start: Start, partition: int | None = None) -> dict[int, int]:
    """Return the offset to start at in each partition, or in `partition`; none for END: the watch finds it.

    Raises:
        BeyondEnd: see there.
        Refused: the topic or the partition is unknown, or Kafka does not answer.
    """
    partitions = await lookup.partitions(topic)
    if partition is not None:
        wanted = TopicPartition(topic, partition)
        if wanted not in partitions:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{topic} has {len(partitions)} partitions")
        partitions = (wanted,)
    if start is StartPosition.END:
        return {}
    if start is StartPosition.BEGINNING:
        offsets = dict.fromkeys(partitions, 0) | await lookup.beginnings(partitions, led=True)
    elif isinstance(start, AtOffsets):
        ends = await lookup.ends(partitions, led=True)
        firsts = dict.fromkeys(partitions, 0) | await lookup.beginnings(partitions, led=True)
        offsets = {}
        for tp, first in firsts.items():
            wanted_offset = max(first, start.offsets.get(tp.partition, first))
            offsets[tp] = min(wanted_offset, ends.get(tp, wanted_offset))
    else:
        # The ends come first: records stored during the next request lie behind them.
        offsets = await lookup.ends(partitions)
        if start is StartPosition.LAST:
            firsts = await lookup.beginnings(partitions)
            offsets = {tp: max(first, offsets[tp] - 1) for tp, first in firsts.items()}
        elif isinstance(start, AtTime):
            offsets |= await lookup.since(partitions, start.timestamp)
        elif isinstance(start, AtOffset):
            for tp, end in offsets.items():
                if start.offset > end:
                    raise BeyondEnd(f"the log of {topic} ends at offset {end} in partition {tp.partition}")
            offsets = dict.fromkeys(partitions, start.offset)
    return {tp.partition: offset for tp, offset in offsets.items()}
