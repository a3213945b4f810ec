"""Makes our own records directly of what an aiokafka consumer has fetched.

aiokafka makes a `ConsumerRecord` of each record, with a generator, two methods and a dataclass: that is most of what
reading one costs. Here `Received` is made directly of what its compiled parser finds. And its generator is a reference
cycle around the whole fetch, which nothing but the collector frees when it is not read to its end (ADR 0030). The
private parts that this needs are listed in `private_parts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any, Final

import aiokafka.consumer.consumer
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, Fetcher, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException, KafkaError, OffsetOutOfRangeError

from gateway.kafka.driver.wire import NO_LEADER
from mapping.record import Received

log = logging.getLogger(__name__)

NUDGE_S: Final = 0.2
"""So often the fetcher is woken while somebody waits. A fetch that ends in the same turn of the loop in which something
else wakes the fetcher counts as on its way there; it would fetch nothing then until its own pause is over."""

LEADERS_AGAIN_S: Final = 1.0
"""Before a consumer asks Kafka again who leads the partitions that nobody leads."""

TELL_S: Final = 60.0
"""Between two lines in the log about partitions that nobody leads."""


class NearerCopies(dict[TopicPartition, tuple[int, float]]):
    """Which partitions are read from another broker than their leader: its node, and until when (KIP-392)."""

    moves = 0  # grows when a partition is to be read from elsewhere
    left: TopicPartition | None = None  # the last one that was given up, if that was the last that was asked about

    def __setitem__(self, place: TopicPartition, copy: tuple[int, float]) -> None:
        if self.get(place, (None,))[0] != copy[0]:
            self.moves += 1
        super().__setitem__(place, copy)

    def pop(self, place: TopicPartition, *default: Any) -> Any:
        """See `dict`."""
        self.left = place if place in self else None
        self.moves += place in self
        return super().pop(place, *default)


class PacedFetcher(Fetcher):  # type: ignore[misc]  # aiokafka carries no types
    """aiokafka's fetcher, which would ask without a pause who leads a partition that nobody leads."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._asked_for_leaders = float("-inf")
        super().__init__(*arguments, **settings)
        self._preferred_read_replica = NearerCopies()

    def _set_error(self, place: TopicPartition, error: KafkaError) -> None:
        """A partition cannot be read on. What a copy does not have its leader may have, which is asked next."""
        if not (isinstance(error, OffsetOutOfRangeError) and self._preferred_read_replica.left == place):
            super()._set_error(place, error)

    def _get_actions_per_node(self, assignment: Any) -> tuple[list[Any], dict[int, Any], float, bool, list[Any]]:
        """What to do next: fetches, what to reset, how long to wait at most, whether to ask who leads, what resumes."""
        fetches, resets, wait, lacking, resumed = super()._get_actions_per_node(assignment)
        if not lacking:
            return fetches, resets, wait, False, resumed
        return fetches, resets, min(wait, LEADERS_AGAIN_S), self.may_ask_for_leaders(assignment), resumed

    def may_ask_for_leaders(self, assignment: Any) -> bool:
        """Whether it is time to ask who leads what nobody leads; it is told, too."""
        now = asyncio.get_running_loop().time()
        if now < self._asked_for_leaders + LEADERS_AGAIN_S:
            return False
        self._asked_for_leaders = now
        _notice.leaderless(self._client, assignment.tps, now)
        return True

    async def _proc_offset_request(self, node_id: int, topic_data: Any) -> Any:
        try:
            return await super()._proc_offset_request(node_id, topic_data)
        except KafkaError as error:
            # One partition's error holds up all others of its broker until it is known to be led elsewhere, or gone.
            if error.invalid_metadata:
                self._client.force_metadata_update()
            raise


class _Notice:
    """Said once a minute for the whole process: there may be thousands of consumers."""

    def __init__(self) -> None:
        self._told = float("-inf")

    def leaderless(self, client: Any, partitions: Collection[TopicPartition], now: float) -> None:
        lacking = _leaderless(client, partitions) if now >= self._told + TELL_S else ()
        for topic, number in sorted(lacking)[:1]:
            self._told = now
            log.warning("%d partitions have no leader, such as %s-%d; others are read on", len(lacking), topic, number)


_notice: Final = _Notice()


def _leaderless(client: Any, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
    leader_of = client.cluster.leader_for_partition
    return {place for place in partitions if leader_of(place) == NO_LEADER}


def use_paced_fetchers() -> None:
    """Have each consumer of aiokafka in this process fetch so; it has no parameter for it."""
    aiokafka.consumer.consumer.Fetcher = PacedFetcher


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


async def position(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int | None:
    """What `consumer.position` says; the fetcher, which finds it, is woken as in `fetch`.

    Returns:
        None when it is not known yet, and nobody leads the partition.

    Raises:
        IllegalStateError: the partition is not ours.
        KafkaError: as `consumer.position`.
    """
    while True:
        lacking = without_leader(consumer, (partition,))
        try:
            async with asyncio.timeout(0 if lacking else NUDGE_S):  # one that is known is told without waiting
                found: int = await consumer.position(partition)
                return found
        except TimeoutError:
            if lacking:
                return None
            _wake(consumer._fetcher)


def without_leader(consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
    """Those of the partitions that nobody leads, as of a started consumer's last metadata."""
    return _leaderless(consumer._client, partitions)


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
