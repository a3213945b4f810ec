"""After a crash: which exchanges of QoS 2 messages are in the log, by the header that their records carry.

The part of the log that a dead gateway's flight records do not account for is read once, by one consumer, however many
partitions it has. Records that were not committed by somebody's transaction yet do not end it: ours lie behind them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import (
    CHUNK,
    ConsumerOptions,
    close_consumer,
    is_broken,
    log_consumer,
    start_consumer,
)
from gateway.spawn import Spawn
from mapping.record import MQTT_EXCHANGE, Received

log = logging.getLogger(__name__)

Found = dict[str, set[tuple[int, int]]]
"""Session nonce -> packet identifier and sequence of each exchange."""

RETRY_S: Final = 0.5
STALLED_S: Final = 10.0
"""Without a record for so long, it is looked whether the topics are still there."""
_HIGHEST_ID: Final = 65_535
_DIGITS: Final = 18  # of a sequence


async def find_exchanges(
    kafka: ConsumerOptions, lookup: Lookup, spawn: Spawn, ranges: Mapping[TopicPartition, int]
) -> Found:
    """Read each partition from an offset to its end as of this call, and collect the exchanges.

    Partitions that do not exist (any more) are left out, and a partition whose records from the offset on are gone is
    read from its first record. Kafka is asked until it answers: nothing can be said without it.

    Args:
        kafka: see `ConsumerOptions`.
        lookup: knows which topics there are.
        spawn: starts background work.
        ranges: partition -> the offset of the first record that matters.
    """
    scan = _Scan(ranges)
    while True:
        try:
            await scan.leave_out_missing(lookup)
            if scan.positions:
                await _read(scan, kafka, spawn)
        except (KafkaError, Refused) as error:
            log.warning("QoS 2 exchanges: the log cannot be read: %r", error)
            await asyncio.sleep(RETRY_S)
        else:
            return scan.found


class _Scan:
    """How far the reading is.

    Attributes:
        positions: partition -> the next offset to read; without those that are done.
        ends: partition -> where to stop: where the log ended when it was asked for first, or ends now, if it shrank.
        found: what was collected.
    """

    __slots__ = ("ends", "found", "positions")

    def __init__(self, ranges: Mapping[TopicPartition, int]) -> None:
        self.positions = dict(ranges)
        self.ends: dict[TopicPartition, int] = {}
        self.found: Found = {}

    async def leave_out_missing(self, lookup: Lookup) -> None:
        """Forget the partitions that do not exist; Refused when Kafka does not answer."""
        found = await lookup.existing({partition.topic for partition in self.positions})
        there = {partition for partitions in found.values() for partition in partitions}
        self.positions = {partition: offset for partition, offset in self.positions.items() if partition in there}

    def begin(self, firsts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> None:
        """Fit the positions into the log as it is now, and the ends."""
        for partition, first in firsts.items():
            if partition not in self.positions:
                continue
            end = self.ends[partition] = min(ends[partition], self.ends.get(partition, ends[partition]))
            position = self.positions[partition]
            # Behind the end: the topic was made anew, so all of it is new.
            self.reach(partition, first if position > end else max(first, position))

    def reach(self, partition: TopicPartition, position: int) -> bool:
        """Everything below `position` was read or is gone; whether the partition is done."""
        if position < self.ends[partition]:
            self.positions[partition] = position
            return False
        del self.positions[partition]
        return True

    def collect(self, records: list[Received]) -> None:
        """Note the exchanges."""
        for record in records:
            for name, value in record.headers:
                if name == MQTT_EXCHANGE:
                    exchange = parse(value)
                    if exchange is not None:
                        nonce, packet_id, sequence = exchange
                        self.found.setdefault(nonce, set()).add((packet_id, sequence))


def parse(value: bytes | None) -> tuple[str, int, int] | None:
    """Nonce, packet identifier and sequence of a header `nonce/packet id/sequence`; None when it is none."""
    parts = (value or b"").split(b"/")
    if len(parts) != 3:
        return None
    nonce, packet_id, sequence = parts
    if not (nonce and nonce.isascii() and packet_id.isdigit() and sequence.isdigit()):
        return None
    if len(sequence) > _DIGITS or len(packet_id) > _DIGITS or not 0 < int(packet_id) <= _HIGHEST_ID:
        return None
    return nonce.decode(), int(packet_id), int(sequence)


async def _read(scan: _Scan, kafka: ConsumerOptions, spawn: Spawn) -> None:
    """Read until every partition is done; KafkaError, and it may be tried again from where it came."""
    consumer = log_consumer(kafka, wait_ms=10, isolation="read_uncommitted")  # there is something to read
    await start_consumer(consumer, spawn)
    try:
        await _begin(scan, consumer)
        loop = asyncio.get_running_loop()
        moved = loop.time()
        while scan.positions:
            if await _advance(scan, consumer):
                moved = loop.time()
            elif is_broken(consumer) or loop.time() - moved > STALLED_S:
                raise KafkaError("nothing comes")
    finally:
        await close_consumer(consumer)


async def _begin(scan: _Scan, consumer: AIOKafkaConsumer) -> None:
    partitions = list(scan.positions)
    scan.begin(await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions))
    consumer.assign(list(scan.positions))
    for partition, position in scan.positions.items():
        consumer.seek(partition, position)


async def _advance(scan: _Scan, consumer: AIOKafkaConsumer) -> bool:
    """Take what has come; whether something has."""
    try:
        batches = await consumer.getmany(timeout_ms=200, max_records=CHUNK)
    except OffsetOutOfRangeError:  # the log's beginning moves while we read
        await _begin(scan, consumer)
        return True
    for records in batches.values():
        scan.collect(records)
    moved = bool(batches)
    for partition, before in tuple(scan.positions.items()):
        # Also past control records and what compaction left.
        position = await consumer.position(partition)
        moved = moved or position > before
        if scan.reach(partition, position):
            consumer.pause(partition)
    await asyncio.sleep(0)
    return moved
