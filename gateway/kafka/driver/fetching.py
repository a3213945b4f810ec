"""Makes our own records directly of what an aiokafka consumer has fetched.

aiokafka makes a `ConsumerRecord` of each record, with a generator, two methods and a dataclass: that is most of what
reading one costs. Here `Received` is made directly of what its compiled parser finds. And its generator is a reference
cycle around the whole fetch, which nothing but the collector frees when it is not read to its end (ADR 0030). The
private parts that this needs are listed in `private_parts`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, Fetcher, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException

from mapping.record import Received

NUDGE_S: Final = 0.2
"""So often the fetcher is woken while somebody waits. A fetch that ends in the same turn of the loop in which something
else wakes the fetcher counts as on its way there; it would fetch nothing then until its own pause is over."""


async def fetch(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition], *, timeout_s: float, most: int
) -> dict[TopicPartition, list[Received]]:
    """What `consumer.getmany` would bring, sooner; its position moves behind them as there.

    The consumer was started by `lifecycle.start_consumer`, and nobody else reads from it by `getmany`. Without
    `partitions` all are read.

    Raises:
        ConsumerStoppedError: it was stopped.
        KafkaError: as `getmany`.
    """
    fetcher = consumer._fetcher
    now = asyncio.get_running_loop().time
    until = now() + timeout_s
    while True:
        found: dict[TopicPartition, list[Received]] = await consumer.getmany(*partitions, max_records=most)
        if found or now() >= until:
            return found
        try:
            async with asyncio.timeout_at(min(until, now() + NUDGE_S)):
                await fetcher._create_fetch_waiter()  # raises what forbids to read
        except TimeoutError:
            _wake(fetcher)


async def position(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int:
    """What `consumer.position` says; the fetcher, which finds it, is woken as in `fetch`.

    Raises:
        IllegalStateError: the partition is not ours.
        KafkaError: as `consumer.position`.
    """
    while True:
        try:
            async with asyncio.timeout(NUDGE_S):
                found: int = await consumer.position(partition)
                return found
        except TimeoutError:
            _wake(consumer._fetcher)


def _wake(fetcher: Fetcher) -> None:
    fetcher._notify(fetcher._wait_consume_future)


def convert_arrivals(consumer: AIOKafkaConsumer) -> None:
    """Let all that a started consumer fetches be read as our records, and be freed with its last reference."""
    fetcher = consumer._fetcher
    if type(fetcher._records) is not _Arrivals:
        fetched, fetcher._records = fetcher._records, _Arrivals()
        fetcher._records.update(fetched)


class _Arrivals(OrderedDict[TopicPartition, Any]):
    """In the place of a fetcher's `_records`: what was fetched and is not read to its end."""

    def __setitem__(self, partition: TopicPartition, result: Any) -> None:
        if type(result) is FetchResult and type(result._partition_records) is PartitionRecords:
            result._partition_records = _Converted(result._partition_records)
        super().__setitem__(partition, result)


class _Converted:
    """Stands in a `FetchResult` where aiokafka's `PartitionRecords` stood: iterated, and asked how far that came."""

    __slots__ = ("_records", "_source")

    def __init__(self, source: PartitionRecords) -> None:
        source._records_iterator = None  # it would hold its holder
        self._source = source
        self._records = _unpack(source)

    def __iter__(self) -> Iterator[Received]:
        return self._records  # goes on where it was left

    @property
    def next_fetch_offset(self) -> int:
        offset: int = self._source.next_fetch_offset
        return offset


def _unpack(source: PartitionRecords) -> Iterator[Received]:
    """Its records that may be seen; `next_fetch_offset` is moved behind each, and behind what is left out."""
    topic, partition = source._tp
    batches = source._records
    while batches.has_next():
        batch = batches.next_batch()
        if not batch.validate_crc():
            raise CorruptRecordException(f"a batch of {topic}, partition {partition}, does not have its checksum")
        if not (_is_aborted(source, batch) or batch.is_control_batch):
            for record in batch:
                offset = record.offset
                if offset >= source.next_fetch_offset:  # the first batch may begin before what was asked for
                    source.next_fetch_offset = offset + 1
                    yield Received(
                        topic, record.key, record.value, tuple(record.headers), record.timestamp, partition, offset
                    )
        source.next_fetch_offset = batch.next_offset


def _is_aborted(source: PartitionRecords, batch: Any) -> bool:
    """Whether a batch belongs to a transaction that was aborted, for one who reads only what was committed."""
    producer = batch.producer_id
    if source._isolation_level != READ_COMMITTED or producer is None:
        return False
    source._consume_aborted_up_to(batch.base_offset)
    if batch.is_control_batch and source._contains_abort_marker(batch):
        source._aborted_producers.discard(producer)
    return batch.is_transactional and producer in source._aborted_producers
