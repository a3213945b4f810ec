"""The progress of a polled member's client: records held for it, delivered to it, and confirmed by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from mapping.record import Received


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The first `count` held records of a partition, as delivered to a client."""

    partition: TopicPartition
    first: Received
    count: int


class MemberProgress:
    """Two positions per partition, each the offset of the next record, and the start of those without a commit."""

    def __init__(self) -> None:
        self.held: dict[TopicPartition, list[Received]] = {}  # by partition: records fetched and not delivered
        self.delivered: dict[TopicPartition, int] = {}  # up to here records were written to the client
        self.confirmed: dict[TopicPartition, int] = {}  # delivered before its latest poll, which proves their arrival
        self.starts: dict[TopicPartition, int] = {}  # where partitions began in which the group had committed nothing
        self._committed: dict[TopicPartition, int] = {}
        # Recreated topics: the position in each partition, or None where the group has committed since.
        self._recreated: dict[str, dict[int, int | None]] = {}

    def forget(self) -> None:
        """Forget all positions: the partitions have changed, or may have."""
        self.held.clear()
        self.delivered.clear()
        self.confirmed.clear()
        self.starts.clear()
        self._committed.clear()

    def hold(self, fetched: Mapping[TopicPartition, list[Received]]) -> None:
        """Append fetched records to the held ones."""
        for partition, records in fetched.items():
            self.held.setdefault(partition, []).extend(records)

    def deliver(self, chunks: Iterable[Chunk]) -> None:
        """Note that these chunks were written to the client; one of a partition revoked or moved since is void."""
        for chunk in chunks:
            records = self.held.get(chunk.partition)
            if not records or records[0] is not chunk.first:
                continue
            self.delivered[chunk.partition] = records[chunk.count - 1].offset + 1
            self._note_position(chunk.partition, self.delivered[chunk.partition])
            if chunk.count == len(records):
                del self.held[chunk.partition]
            else:
                del records[: chunk.count]

    @property
    def reached(self) -> dict[TopicPartition, int]:
        """What was delivered, and the starts of partitions of which nothing was."""
        return self.starts | self.delivered

    def pass_markers(self, partition: TopicPartition, before: int | None, position: int | None) -> None:
        """Note that a fetch has led the consumer's position from `before` past what clients do not get.

        These are transaction markers and aborted records. Without this, the group's lag would never be 0.
        """
        if position is None or partition in self.held:
            return
        known = self.delivered.get(partition, before)
        if known is not None and known < position:
            self.delivered[partition] = position
            self._note_position(partition, position)

    def confirm(self) -> None:
        """Note that the client polls again: everything delivered has arrived."""
        self.confirmed.update(self.delivered)

    def move(self, partition: TopicPartition, offset: int) -> None:
        """Continue a partition at `offset`."""
        self.held.pop(partition, None)
        self.delivered[partition] = offset
        self.confirmed.pop(partition, None)
        self._note_position(partition, offset)

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Note committed offsets."""
        for partition, offset in offsets.items():
            self._committed[partition] = offset.offset
            self._note_position(partition, None)

    def uncommitted(
        self, positions: Mapping[TopicPartition, int], ours: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the part of `positions` (`delivered` or `confirmed`) to commit in the assigned partitions, `ours`."""
        return {
            partition: OffsetAndMetadata(offset, "")
            for partition, offset in positions.items()
            if partition in ours and self._committed.get(partition) != offset
        }

    def restart_topic(self, topic: str) -> None:
        """Note that a topic was recreated: the group's commits in the former topic do not count."""
        self._recreated[topic] = {}

    def restarted(self, partitions: Collection[TopicPartition]) -> Iterator[tuple[TopicPartition, int]]:
        """Yield the positions in partitions of recreated topics where the group has committed nothing since."""
        for partition in partitions if self._recreated else ():
            offset = self._recreated.get(partition.topic, {partition.partition: None}).get(partition.partition, 0)
            if offset is not None:
                yield partition, offset

    def _note_position(self, partition: TopicPartition, offset: int | None) -> None:
        """Note the position in a recreated topic until the group has committed in it."""
        positions = self._recreated.get(partition.topic)
        if positions is not None and positions.get(partition.partition, 0) is not None:
            positions[partition.partition] = offset
