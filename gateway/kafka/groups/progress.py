"""How far the client of a polled member is: what is held for it, what it was given, and what it is known to have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from mapping.record import Received


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The first `count` held records of a partition, as given to a client."""

    partition: TopicPartition
    first: Received
    count: int


class Progress:
    """Two positions a partition, as offsets of the next record."""

    def __init__(self) -> None:
        self.held: dict[TopicPartition, list[Received]] = {}  # by partition, what was fetched and not delivered
        self.delivered: dict[TopicPartition, int] = {}  # what was written to the client
        self.confirmed: dict[TopicPartition, int] = {}  # what it had before it asked again, which shows that it arrived
        self._committed: dict[TopicPartition, int] = {}
        # Topics that were made again: by partition, where we are; None where the group has committed since.
        self._anew: dict[str, dict[int, int | None]] = {}

    def forget(self) -> None:
        """The partitions are others, or may be."""
        self.held.clear()
        self.delivered.clear()
        self.confirmed.clear()
        self._committed.clear()

    def hold(self, fetched: Mapping[TopicPartition, list[Received]]) -> None:
        """These were fetched, behind what is held."""
        for partition, records in fetched.items():
            self.held.setdefault(partition, []).extend(records)

    def deliver(self, chunks: Iterable[Chunk]) -> None:
        """These were written to the client. A chunk of a partition that was revoked or moved meanwhile is void."""
        for chunk in chunks:
            records = self.held.get(chunk.partition)
            if not records or records[0] is not chunk.first:
                continue
            self.delivered[chunk.partition] = records[chunk.count - 1].offset + 1
            self._note(chunk.partition, self.delivered[chunk.partition])
            if chunk.count == len(records):
                del self.held[chunk.partition]
            else:
                del records[: chunk.count]

    def confirm(self) -> None:
        """The client asks again: it has what it was given."""
        self.confirmed.update(self.delivered)

    def move(self, partition: TopicPartition, offset: int) -> None:
        """It is read on from there."""
        self.held.pop(partition, None)
        self.delivered[partition] = offset
        self.confirmed.pop(partition, None)
        self._note(partition, offset)

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """These were committed."""
        for partition, offset in offsets.items():
            self._committed[partition] = offset.offset
            self._note(partition, None)

    def uncommitted(
        self, positions: Mapping[TopicPartition, int], ours: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What to commit of `delivered` or `confirmed`, in partitions that are `ours`."""
        return {
            partition: OffsetAndMetadata(offset, "")
            for partition, offset in positions.items()
            if partition in ours and self._committed.get(partition) != offset
        }

    def begin_anew(self, topic: str) -> None:
        """A topic was deleted and made again: what the group has committed of the former one does not count."""
        self._anew[topic] = {}

    def anew(self, partitions: Collection[TopicPartition]) -> Iterator[tuple[TopicPartition, int]]:
        """Where we are in those partitions whose topics were made again, and nothing was committed since."""
        for partition in partitions if self._anew else ():
            place = self._anew.get(partition.topic, {partition.partition: None}).get(partition.partition, 0)
            if place is not None:
                yield partition, place

    def _note(self, partition: TopicPartition, offset: int | None) -> None:
        """Where we are in a topic that was made again, until the group has committed in it."""
        places = self._anew.get(partition.topic)
        if places is not None and places.get(partition.partition, 0) is not None:
            places[partition.partition] = offset
