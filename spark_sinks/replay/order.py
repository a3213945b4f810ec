"""In which order records go once more, and which of them have gone before. No I/O.

Each origin partition keeps its own order. Between partitions time decides, by the newest time that a partition has
shown so far: so its own order holds, and whoever computes windows sees the partitions abreast.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from spark_sinks.replay.items import Item, Place

_BLOCK_BITS: Final = 10


class Merge:
    """Partitions of logs as one stream.

    Args:
        begins: of each partition, the first offset.
        ends: where each ends, exclusive.

    Attributes:
        positions: of each partition, the offset behind the last record that was taken.
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
        """Offsets that were not taken yet: as many records, or fewer."""
        return sum(max(0, self._ends[place] - position) for place, position in self.positions.items())

    def feed(self, place: Place, records: Iterable[Any], behind: int) -> None:
        """The next records of a partition in `waiting` (with `offset` and `timestamp`), and where it was read to."""
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
        """The time of the next record; None when there is none, or a partition must be read before."""
        return None if self.waiting or not self._heads else self._heads[0][0]

    def pop(self) -> Any:
        """The next record, when `peek` has told its time."""
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
        self._times[place] = time = max(self._times[place], self._buffers[place][0].timestamp)
        heapq.heappush(self._heads, (time, place))


def in_order(items: Iterable[Item]) -> Sequence[Item]:
    """Items in the order of their origin partitions, and between these by time."""
    partitions: dict[Place, list[Item]] = {}
    for item in items:
        partitions.setdefault(item.place, []).append(item)
    streams = []
    for place, members in partitions.items():
        members.sort(key=lambda item: item.offset)
        newest = 0
        stream: list[tuple[int, Place, int, Item]] = []
        for item in members:
            newest = max(newest, item.timestamp or 0)
            stream.append((newest, place, item.offset, item))
        streams.append(stream)
    return [item for _, _, _, item in heapq.merge(*streams, key=lambda entry: entry[:3])]


class Origins:
    """Which offsets were seen: a bit each, in blocks, so that ten million take some megabytes."""

    def __init__(self) -> None:
        self._blocks: dict[Place, dict[int, int]] = {}

    def add(self, place: Place, offset: int) -> bool:
        """Note an offset; False when it was there already."""
        blocks = self._blocks.setdefault(place, {})
        block, bit = offset >> _BLOCK_BITS, 1 << (offset & (1 << _BLOCK_BITS) - 1)
        known = blocks.get(block, 0)
        blocks[block] = known | bit
        return not known & bit


def target_partition(item: Item, topic: str, partitions: int, origin_partitions: int | None, by_key: int) -> int:
    """Where an item goes: to the partition that it was in, where that is the same thing there; else by its key.

    Args:
        item: which.
        topic: where it goes, with so many `partitions`.
        partitions: of `topic`.
        origin_partitions: of the topic where it comes from; None: it is no more.
        by_key: the partition that Kafka's own rule finds for its key; -1: it has none.
    """
    alike = item.topic == topic or origin_partitions == partitions
    if alike and item.partition < partitions:
        return item.partition
    return by_key if by_key >= 0 else item.partition % partitions
