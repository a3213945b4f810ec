"""Reads a part of the log once, from given offsets to its end as of the call: what is stored there after a crash.

One consumer reads it, however many partitions there are. Records of transactions that are not committed yet do not end
it: what is looked for may lie behind them. Every record is given out whoever wrote it, so a caller must judge what it
finds: any client of Kafka can write the same headers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import ConsumerOptions, log_consumer, poll
from gateway.kafka.driver.lifecycle import RETRY_S, open_consumer
from gateway.spawn import Spawn
from mapping.record import Received

log = logging.getLogger(__name__)

STALLED_S: Final = 10.0
"""Without a record for so long, the scan looks whether the topics are still there."""

Collect = Callable[[Received], None]
"""Told each record, some of them twice where Kafka failed meanwhile."""


async def scan_log(
    kafka: ConsumerOptions, lookup: Lookup, spawn: Spawn, ranges: Mapping[TopicPartition, int], collect: Collect
) -> None:
    """Read each partition from the offset of the first record that matters to its end as of this call.

    Partitions that do not exist (any more) are left out, and a partition whose records from the offset on are gone is
    read from its first record. Kafka is asked until it answers: give it a time limit.
    """
    scan = _Scan(ranges, collect)
    while True:
        try:
            await scan.leave_out_missing(lookup)
            if scan.positions:
                consumer = log_consumer(kafka, wait_ms=10, isolation="read_uncommitted")  # there is something to read
                async with open_consumer(consumer, spawn):
                    await scan.read(consumer)
        except (KafkaError, Refused) as error:
            log.warning("a part of the log cannot be read: %r", error)
            await asyncio.sleep(RETRY_S)
        else:
            return


class _Scan:
    """How far the reading is."""

    __slots__ = ("_collect", "ends", "positions")

    def __init__(self, ranges: Mapping[TopicPartition, int], collect: Collect) -> None:
        self.positions = dict(ranges)  # partition -> the next offset to read; without those that are done
        # partition -> where to stop: where the log ended when it was asked for first, or ends now, if it shrank
        self.ends: dict[TopicPartition, int] = {}
        self._collect = collect

    async def leave_out_missing(self, lookup: Lookup) -> None:
        """Forget the partitions that do not exist; Refused when Kafka does not answer."""
        found = await lookup.existing({partition.topic for partition in self.positions})
        there = {partition for partitions in found.values() for partition in partitions}
        self.positions = {partition: offset for partition, offset in self.positions.items() if partition in there}

    async def read(self, consumer: AIOKafkaConsumer) -> None:
        """Read until every partition is done; KafkaError, and it may be tried again from where it came."""
        await self._begin(consumer)
        loop = asyncio.get_running_loop()
        moved = loop.time()
        while self.positions:
            if await self._advance(consumer):
                moved = loop.time()
            elif loop.time() - moved > STALLED_S:
                raise KafkaError("nothing comes")

    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        """Fit the positions into the log as it is now, and the ends; seek."""
        partitions = list(self.positions)
        firsts, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
        for partition in partitions:
            end = self.ends[partition] = min(ends[partition], self.ends.get(partition, ends[partition]))
            first, position = firsts[partition], self.positions[partition]
            # Behind the end: the topic was made anew, so all of it is new.
            self._reach(partition, first if position > end else max(first, position))
        consumer.assign(list(self.positions))
        for partition, position in self.positions.items():
            consumer.seek(partition, position)

    async def _advance(self, consumer: AIOKafkaConsumer) -> bool:
        """Take what has come; whether something has."""
        try:
            batches = await poll(consumer, wait_ms=200)
        except OffsetOutOfRangeError:  # the log's beginning moves while we read
            await self._begin(consumer)
            return True
        collect = self._collect
        for records in batches.values():
            for record in records:
                collect(record)
        moved = bool(batches)
        for partition, before in tuple(self.positions.items()):
            # Also past control records and what compaction left.
            position = await consumer.position(partition)
            moved = moved or position > before
            if self._reach(partition, position):
                consumer.pause(partition)
        await asyncio.sleep(0)
        return moved

    def _reach(self, partition: TopicPartition, position: int) -> bool:
        """Everything below `position` was read or is gone; whether the partition is done."""
        if position < self.ends[partition]:
            self.positions[partition] = position
            return False
        del self.positions[partition]
        return True
