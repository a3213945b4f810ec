"""Where the polled members of a group start, and go on after a rebalance, by the rule of `start_offsets`.

aiokafka resets a position that was not committed to the end, at each rebalance: with `auto.offset.reset` latest, all
that was stored since the group had begun and was not read would be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from weakref import WeakValueDictionary

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.driver.kafka_consumer import commit_offsets, committed_positions
from gateway.kafka.groups.start_offsets import StartOffsets


class MemberStarts(StartOffsets):
    """The start offsets of a group, shared by its members in this process; they live as long as one of these."""

    def __init__(self, group: str, lookup: Lookup) -> None:
        super().__init__(group, lookup)
        self._finding = asyncio.Lock()

    async def fix(self, consumer: AIOKafkaConsumer, topics: Collection[str]) -> None:
        """Fix where a new group starts in `topics`, before a member joins it. Raises as `find`.

        What an earlier member has fixed stays.
        """
        async with self._finding:
            known = {tp.topic for tp in self._ends}
            self.begin_at_end(set(topics) - known)
            await self.find(consumer, frozenset(topics), known.union(topics))

    async def seek(
        self,
        consumer: AIOKafkaConsumer,
        partitions: Collection[TopicPartition],
        left: dict[TopicPartition, int],
        *,
        commit: bool,
    ) -> dict[TopicPartition, int] | None:
        """Seek to where the group starts in assigned partitions in which it has committed nothing.

        `left` has positions that the member had in them before the rebalance. With `commit` the starts are committed,
        for whichever member gets the partitions next.

        Returns:
            The offsets sought; None when the assignment has changed meanwhile.

        Raises:
            KafkaError: Kafka is unreachable, or denies access.
        """
        committed = await committed_positions(consumer, partitions)
        self.forget(committed)
        offsets = await self.offsets_of(set(partitions) - committed.keys())
        if consumer.assignment() != set(partitions):
            return None
        offsets |= {partition: left[partition] for partition in offsets.keys() & left.keys()}
        for partition, offset in offsets.items():
            consumer.seek(partition, offset)
        if commit and offsets:
            await commit_offsets(consumer, {tp: OffsetAndMetadata(offset, "") for tp, offset in offsets.items()})
        return offsets


class StartsOfGroups:
    """The `MemberStarts` of all groups that have polled members in this process."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._groups: WeakValueDictionary[str, MemberStarts] = WeakValueDictionary()

    def of(self, group: str) -> MemberStarts:
        """Return the group's; its members keep it."""
        starts = self._groups.get(group)
        if starts is None:
            starts = self._groups[group] = MemberStarts(group, self._lookup)
        return starts
