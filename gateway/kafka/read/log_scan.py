"""Reads a part of the log once, from given offsets to the current end, to find what is stored there after a crash.

One consumer reads all partitions. Records of open transactions do not end the scan: the wanted records may lie behind
them. Every record is passed on, whoever wrote it, so a caller must verify what it finds: any Kafka client can write the
same headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import ConsumerOptions, log_consumer, poll
from gateway.kafka.driver.lifecycle import keep_consumer
from gateway.runtime.spawn import Spawn
from mapping.record import Received

STALLED_S: Final = 10.0
"""After this time without a record, the scan checks whether the topics still exist."""

Collect = Callable[[Received], None]
"""Called with each record, with some of them twice if Kafka failed meanwhile."""


async def scan_log(
    kafka: ConsumerOptions, lookup: Lookup, spawn: Spawn, ranges: Mapping[TopicPartition, int], collect: Collect
) -> None:
    """Read each partition from its offset in `ranges` to its end at the time of this call.

    Missing partitions are left out. A partition without records from the offset on is read from its first record.
    Kafka is asked until it answers: set a time limit.
    """
    scan = _Scan(lookup, collect, dict(ranges))
    if ranges:
        await keep_consumer(
            lambda: log_consumer(kafka, wait_ms=10, isolation="read_uncommitted"),  # records are there already
            scan.read,
            "log scan",
            spawn,
        )


class _Scan(msgspec.Struct, eq=False):
    """The progress of a scan."""

    lookup: Lookup
    collect: Collect
    positions: dict[TopicPartition, int]  # the next offsets to read; finished partitions are removed
    # where to stop: the end of the log at the first look-up, or its present end if the log shrank
    ends: dict[TopicPartition, int] = {}

    async def read(self, consumer: AIOKafkaConsumer) -> None:
        """Read until every partition is finished. After a KafkaError it may be called again, and continues."""
        try:
            topic_metadata = await self.lookup.existing({partition.topic for partition in self.positions})
        except Refused as refused:
            raise KafkaError(refused.reason) from refused
        there = {partition for partitions in topic_metadata.values() for partition in partitions}
        self.positions = {partition: offset for partition, offset in self.positions.items() if partition in there}
        if self.positions:
            await self._begin(consumer)
        loop = asyncio.get_running_loop()
        moved = loop.time()
        while self.positions:
            if await self._advance(consumer):
                moved = loop.time()
            elif loop.time() - moved > STALLED_S:
                raise KafkaError("no records arrive")

    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        """Adjust the positions and the ends to the current log, and seek."""
        partitions = list(self.positions)
        firsts, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
        for partition in partitions:
            end = self.ends[partition] = min(ends[partition], self.ends.get(partition, ends[partition]))
            first, position = firsts[partition], self.positions[partition]
            # Behind the end: the topic was recreated, so all of it is new.
            self._reach(partition, first if position > end else max(first, position))
        consumer.assign(list(self.positions))
        for partition, position in self.positions.items():
            consumer.seek(partition, position)

    async def _advance(self, consumer: AIOKafkaConsumer) -> bool:
        """Read the next records; return whether there was progress."""
        try:
            batches = await poll(consumer, wait_ms=200)
        except OffsetOutOfRangeError:  # retention has moved the log's beginning
            await self._begin(consumer)
            return True
        collect = self.collect
        for records in batches.values():
            for record in records:
                collect(record)
        moved = bool(batches)
        for partition, before in tuple(self.positions.items()):
            # The position also passes control records and compacted ones.
            position = await consumer.position(partition)
            moved = moved or position > before
            if self._reach(partition, position):
                consumer.pause(partition)
        await asyncio.sleep(0)
        return moved

    def _reach(self, partition: TopicPartition, position: int) -> bool:
        """Note that everything below `position` was read or is gone; return whether the partition is finished."""
        if position < self.ends[partition]:
            self.positions[partition] = position
            return False
        del self.positions[partition]
        return True
