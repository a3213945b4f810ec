"""The one consumer of the live reader: its assignment, its positions, and what it knows of the logs' ends.

aiokafka's `assign` drops every position and all records that were fetched but not returned. So the positions are kept
here, advanced with every `getmany` (which returns without an intermediate suspension), and all of them are sought again
after each `assign`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError, TopicAuthorizationFailedError

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.fetch.fetch_sessions import SessionFetcher, session_fetcher
from gateway.kafka.driver.kafka_consumer import (
    ConsumerOptions,
    fetch_wait_ms,
    log_consumer,
    next_offset,
    on_metadata,
    poll,
    set_fetch_wait,
)
from gateway.kafka.driver.lifecycle import keep_consumer
from gateway.kafka.read.distributor import Fetched
from gateway.kafka.read.watched_topics import WatchedPartition
from gateway.runtime.spawn import Spawn, keep_running

log = structlog.get_logger(__name__)

PART: Final = "live reader"  # its name in the log
RETRY_S: Final = 0.5
GATHER: Final = 3
"""The next fetch gathers records for this multiple of the time of the last hand-over, so that a fan-out with its writes
gets that share of the loop's time. More records for the same subscribers make fewer and longer writes."""
GATHER_FROM_S: Final = 0.002
GATHER_MOST_S: Final = 0.05
"""The longest that such a fan-out delays a record of any other topic."""


class LiveConsumer(msgspec.Struct, eq=False):
    """Reads the watched partitions, and hands their records over partition by partition.

    No consumer is opened before the first partition is there.
    """

    _kafka: ConsumerOptions
    _spawn: Spawn
    _lookup: Lookup
    _partitions: Mapping[
        TopicPartition, WatchedPartition
    ]  # the live reader's; it calls `change_assignment` after each change
    _hand_over: Callable[[Fetched], Awaitable[None]]
    gaps: int = 0  # records that retention had deleted before they were read
    assignments: int = 0  # how often the set of partitions was changed
    _topic_missing: Callable[[], None] = lambda: None
    _metadata_came: Callable[[Any], None] = lambda cluster: None
    _consumer: AIOKafkaConsumer | None = None
    _fetcher: SessionFetcher | None = None  # of the consumer
    _task: asyncio.Task[None] | None = None
    _wanted: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _reassign_timer: asyncio.TimerHandle | None = None
    _reassigned_at: float = float("-inf")
    _denied: set[str] = set()
    _fetches: int = 0  # of consumers that are closed
    _named: int = 0
    _gather_s: float = 0.0  # how long the next fetch gathers: proportional to the work that the last one caused

    def start(self, topic_missing: Callable[[], None], metadata_came: Callable[[Any], None]) -> None:
        """Start to read; Kafka need not be reachable yet.

        `topic_missing` is called when a broker lacks a partition, `metadata_came` with new metadata of the consumer.
        """
        self._topic_missing, self._metadata_came = topic_missing, metadata_came
        self._task = self._spawn(keep_running(self._run, PART))

    async def stop(self) -> None:
        """Stop reading and close the consumer."""
        if self._reassign_timer is not None:
            self._reassign_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def change_assignment(self) -> None:
        """Assign soon, not immediately: each assignment leaves a fetch behind that blocks the connection a while."""
        self._wanted.set()
        if self._reassign_timer is None and self._consumer is not None:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._reassigned_at + fetch_wait_ms(len(self._partitions)) / 1000)
            self._reassign_timer = loop.call_at(at, self._reassign)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue at `offset`, if the partition is assigned."""
        if self._consumer is not None and partition in self._consumer.assignment():
            self._consumer.seek(partition, offset)

    # How far the logs reach.

    def end(self, partition: TopicPartition) -> int | None:
        """The end of the log in the last fetch, including open transactions; None before the first fetch."""
        if self._consumer is None or partition not in self._consumer.assignment():
            return None
        end: int | None = self._consumer.highwater(partition)
        return end

    def next_offset(self, partition: TopicPartition) -> int | None:
        """The offset behind everything that was read, including transaction markers; None when it is not known."""
        return None if self._consumer is None else next_offset(self._consumer, partition)

    def note_stored(self, partition: TopicPartition) -> None:
        """Note that a record was stored in a partition, which is therefore not read to its end."""
        if self._fetcher is not None:
            self._fetcher.news.add(partition)

    def possibly_ahead(self, topics: Collection[str]) -> list[TopicPartition]:
        """Return partitions of watched topics that may have records not handed over yet."""
        fetcher = self._fetcher
        if fetcher is None:
            return [tp for tp in self._partitions if tp.topic in topics]
        unknown = {tp for tp in fetcher.unknown() if tp.topic in topics}
        for tp in list(fetcher.news):
            part = self._partitions.get(tp)
            if part is None or max(part.stored, self.end(tp) or 0) <= part.position:
                fetcher.news.discard(tp)
            elif tp.topic in topics:
                unknown.add(tp)
        return list(unknown)

    @property
    def fetches(self) -> int:
        """The number of fetches sent to brokers."""
        return self._fetches + (0 if self._fetcher is None else self._fetcher.fetches)

    @property
    def named(self) -> int:
        """The number of partitions in these fetches."""
        return self._named + (0 if self._fetcher is None else self._fetcher.named)

    @property
    def leaderless(self) -> int:
        """The number of assigned partitions without a leader in the last metadata."""
        return 0 if self._fetcher is None else self._fetcher.leaderless

    # Reading.

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await keep_consumer(
                lambda: log_consumer(self._kafka, on_missing=self._topic_missing), self._read_all, PART, self._spawn
            )

    async def _read_all(self, consumer: AIOKafkaConsumer) -> None:
        """Read until no topic is watched."""
        self._fetcher = session_fetcher(consumer)
        self._fetcher.news.update(self._partitions)  # records may have been stored while there was no consumer
        on_metadata(consumer, self._metadata_came)
        self._consumer = consumer
        try:
            for part in self._partitions.values():
                part.fetched = part.position  # records fetched and not offered were lost with the last consumer
            self._reassign()
            while self._wanted.is_set():
                await self._read(consumer)
        finally:
            self._fetches += self._fetcher.fetches
            self._named += self._fetcher.named
            self._consumer = self._fetcher = None

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        try:
            batches = await poll(consumer, wait_ms=1000)
        except OffsetOutOfRangeError as error:
            await self._skip_gap(consumer, error.args[0])
            return
        except TopicAuthorizationFailedError as error:
            if str(error) not in self._denied:  # every fetch reports it
                self._denied.add(str(error))
                log.warning("live reader: not authorized to read", error=str(error))
            await asyncio.sleep(RETRY_S)
            return
        fetched: Fetched = []
        for partition, records in batches.items():
            part = self._partitions.get(partition)
            if part is not None:
                part.fetched = max(part.fetched, records[-1].offset + 1)
                fetched.append((partition, part, records))
        clock = asyncio.get_running_loop().time
        began = clock()
        if fetched and self._fetcher is not None:
            self._fetcher.gather_until = began + self._gather_s
        await self._hand_over(fetched)
        took = clock() - began
        self._gather_s = min(GATHER * took, GATHER_MOST_S) if took >= GATHER_FROM_S else 0.0

    async def _skip_gap(self, consumer: AIOKafkaConsumer, positions: dict[TopicPartition, int]) -> None:
        missed = {tp: part for tp in positions if (part := self._partitions.get(tp)) is not None}
        try:
            firsts = await self._lookup.beginnings(missed, led=True)
        except Refused as refused:
            log.warning("live reader: the beginnings are not known", reason=refused.reason)
            return
        if any(first < missed[tp].position for tp, first in firsts.items()):
            await self._lookup.refresh()  # a recreated topic is then read from its beginning, in all partitions
        for partition, first in firsts.items():
            part = missed[partition]
            if self._partitions.get(partition) is not part or partition not in consumer.assignment():
                continue
            # Below the first record: retention was faster. Above the last: the topic was recreated, or its log cut.
            lost = max(0, first - part.position)
            self.gaps += lost
            log.warning(
                "live reader: an offset is gone",
                topic=partition.topic,
                partition=partition.partition,
                offset=part.position,
                lost=lost,
                continues_at=first,
            )
            part.position = part.fetched = first
            consumer.seek(partition, first)

    def _reassign(self) -> None:
        self._reassign_timer = None
        consumer = self._consumer
        if consumer is None:
            return
        self._reassigned_at = asyncio.get_running_loop().time()
        self.assignments += 1
        set_fetch_wait(consumer, fetch_wait_ms(len(self._partitions)))
        consumer.assign(list(self._partitions))
        for partition, part in self._partitions.items():
            consumer.seek(partition, part.fetched)
        if not self._partitions:
            self._wanted.clear()
