"""The order of replayed records, and which were replayed before. No I/O.

Each original partition keeps its order. Partitions are merged by time, using the newest timestamp of a partition so
far: this keeps the order within it, and a job that computes windows sees the partitions in step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from spark_sinks.replay.items import Item, Place

_BLOCK_BITS: Final = 10


class Merge:
    """Merges partitions into one stream.

    Args:
        begins: the first offset of each partition.
        ends: the end offset of each partition, exclusive.

    Attributes:
        positions: the offset after the last record taken from each partition.
    """

    def __init__(self, begins: Mapping[Place, int], ends: Mapping[Place, int]) -> None:
        self.positions = dict(begins)
        self._ends = ends
        self._read = dict(begins)
        self._times = dict.fromkeys(begins, 0)
        self._buffers: dict[Place, deque[Any]] = {place: deque() for place in begins}
        self._heads: list[tuple[int, Place]] = []
        # Partitions that must be read before the next record is known.
        self.waiting = {place for place, begin in begins.items() if begin < ends[place]}

    @property
    def left(self) -> int:
        """An upper limit of the records not yet taken: their offsets."""
        return sum(max(0, self._ends[place] - position) for place, position in self.positions.items())

    def feed(self, place: Place, records: Iterable[Any], behind: int) -> None:
        """Add the next records of a partition in `waiting` (with `offset` and `timestamp`), read up to `behind`."""
        buffer, end = self._buffers[place], self._ends[place]
        buffer.extend(record for record in records if record.offset < end)
        self._read[place] = behind
        if buffer:
            self.waiting.discard(place)
            self._show(place)
        elif behind >= end:
            self.waiting.discard(place)
            self.positions[place] = end

    def peek(self) -> int | None:
        """Return the time of the next record; None if there is none, or a partition must be read first."""
        return None if self.waiting or not self._heads else self._heads[0][0]

    def pop(self) -> Any:
        """Return the next record, after `peek` has returned its time."""
        _, place = heapq.heappop(self._heads)
        buffer = self._buffers[place]
        record = buffer.popleft()
        self.positions[place] = record.offset + 1
        if buffer:
            self._show(place)
        elif self._read[place] < self._ends[place]:
            self.waiting.add(place)
        else:
            self.positions[place] = self._ends[place]
        return record

    def _show(self, place: Place) -> None:
        self._times[place] = time = max(self._times[place], self._buffers[place][0].timestamp or 0)
        heapq.heappush(self._heads, (time, place))


def in_order(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items in the order of their original partitions, merged by time."""
    partitions: dict[Place, list[Item]] = {}
    for item in sorted(items, key=lambda item: item.offset):
        partitions.setdefault(item.place, []).append(item)
    ends = {place: members[-1].offset + 1 for place, members in partitions.items()}
    merge = Merge(dict.fromkeys(ends, 0), ends)
    for place, members in partitions.items():
        merge.feed(place, members, ends[place])
    while merge.peek() is not None:
        yield merge.pop()


class OffsetBits:
    """A set of offsets, stored as bits in blocks, so that ten million take a few megabytes."""

    def __init__(self) -> None:
        self._blocks: dict[Place, dict[int, int]] = {}

    def add(self, place: Place, offset: int) -> bool:
        """Add an offset; False if it was already present."""
        blocks = self._blocks.setdefault(place, {})
        block, bit = offset >> _BLOCK_BITS, 1 << (offset & (1 << _BLOCK_BITS) - 1)
        known = blocks.get(block, 0)
        blocks[block] = known | bit
        return not known & bit


def target_partition(item: Item, topic: str, partitions: int, origin_partitions: int | None, by_key: int) -> int:
    """Choose an item's partition: its original one if the target has the same partitioning, else the one of its key.

    Args:
        item: the record.
        topic: the target topic.
        partitions: number of partitions of `topic`.
        origin_partitions: number of partitions of the original topic. None if it no longer exists.
        by_key: the partition that Kafka's partitioner chooses for the key; -1 without a key.
    """
    alike = item.topic == topic or origin_partitions == partitions
    if alike and item.partition < partitions:
        return item.partition
    return by_key if by_key >= 0 else item.partition % partitions
