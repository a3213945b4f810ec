"""Trivium's own compacted topics as tables, for state that must outlive a process: MQTT sessions, retained messages.

`StateTopics.open` gives a `StateTopic` for each table. One consumer reads all of them: everything from the beginning at
the start, then every new record of any process. A `StateTopic` stores nothing itself: each record is passed to its
`apply`, and what that keeps is the table. The gateway's own writes come back the same way.

Missing topics are created, always compacted. An existing topic that is not compacted would lose state, so it stops the
gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topic_info import InternalTopic, TopicInfo
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.driver.kafka_consumer import ConsumerOptions, log_consumer, on_metadata, poll
from gateway.kafka.driver.lifecycle import keep_consumer
from gateway.kafka.groups.recreated_topics import RecreatedTopics
from gateway.kafka.publish.partitioner import partition_of
from gateway.kafka.publish.publisher import Publisher
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn, keep_running
from gateway.settings.config import ConfigError
from mapping.record import Headers, Received, Record
from telemetry.statistics import counter, gauge, structs_by

log = structlog.get_logger(__name__)

SEGMENT_BYTES: Final = 16 * 1024 * 1024
"""The active segment is never compacted: its size bounds the useless reading at a start, per partition."""
SEGMENT_MS: Final = 3_600_000
DIRTY_RATIO: Final = "0.1"
"""Compact as soon as a tenth is old versions: these topics are small, and each start reads them whole."""
DELETE_RETENTION_MS: Final = 24 * 3_600_000
"""How long a tombstone stays in the log: a gateway that was frozen for less still reads it."""
RETRY_S: Final = 0.5
EMPTY_FETCH_MS: Final = 1000
"""How long the broker holds an empty fetch. Only re-reading a recreated topic waits behind it, and an idle gateway
shall cost little."""
REFRESH_S: Final = 0.5
"""Pause after the first sign that a topic was deleted: many signs follow, and one metadata request serves them all."""

Apply = Callable[[Received], None]
"""Called with each record; a value of None deletes its key. Must be cheap, and must not raise because of a record."""
Restarted = Callable[[int], None]
"""Called with a partition that will be re-read from its beginning: its former contents may no longer exist."""
Reread = Callable[[int], None]
"""Called with a partition that was re-read to its end: keys that did not come again no longer exist."""


def table_configs(largest_bytes: int, retention_ms: int | None) -> tuple[tuple[str, str], ...]:
    """Return the Kafka configuration, as names and values, with which a table's topic is created.

    `largest_bytes` is the size of the largest record, `retention_ms` is as in `StateTopics.open`.
    """
    return (
        ("cleanup.policy", "compact" if retention_ms is None else "compact,delete"),
        *(() if retention_ms is None else (("retention.ms", str(retention_ms)),)),
        ("segment.bytes", str(max(SEGMENT_BYTES, largest_bytes))),
        ("segment.ms", str(SEGMENT_MS)),
        ("min.cleanable.dirty.ratio", DIRTY_RATIO),
        ("delete.retention.ms", str(DELETE_RETENTION_MS)),
        ("max.message.bytes", str(largest_bytes)),
    )


class TopicStatistics(msgspec.Struct, frozen=True):
    """The counters of one table."""

    records_total: Annotated[int, counter("records read and applied")]
    failed_total: Annotated[int, counter("records not applied, because of a bug in the gateway; see the log")]
    restarted_total: Annotated[int, counter("how often a partition was re-read from its beginning")]
    written_total: Annotated[int, counter("records given to the publisher")]
    lag: Annotated[int, gauge("records stored and not applied yet, as of the last fetch")]


class StateStatistics(msgspec.Struct, frozen=True):
    """The counters of all tables; `loaded` is 1 after everything was read."""

    loaded: Annotated[int, gauge("1 once everything was read")]
    table: Annotated[dict[str, TopicStatistics], structs_by("table")]


class PendingWrite(Owner):
    """The owner of one write whose result is awaited."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's answer."""
        if not self.done.done():
            self.done.set_result(result)


@dataclass(slots=True, eq=False)
class StateTopic:
    """One table; made by `StateTopics.open`.

    Attributes:
        partitions: how many the topic has; 0 until it was looked up. The number must not change: a key's versions would
            be in two partitions, and nothing would show which is the last. It may differ in a recreated topic.
    """

    name: str  # of the topic
    publisher: Publisher
    apply: Apply
    restarted: Restarted
    reread: Reread
    expires: bool  # retention may delete old records
    partitions: int = 0
    records: int = 0
    failed: int = 0
    restarts: int = 0
    written: int = 0

    def write(
        self,
        key: bytes,
        value: bytes | None,
        headers: Headers = (),
        *,
        owner: Owner | None,
        token: Any = None,
        partition_key: bytes | None = None,
        partition: int | None = None,
    ) -> None:
        """Write a record to the log (None: a tombstone); `owner` is settled as in `Publisher.submit`.

        Keys with the same `partition_key` (a client id) share a partition and keep their order; without it the key
        itself selects the partition. `partition` names it directly, where the key is known to be there already.

        Raises:
            RuntimeError: the topic was not looked up yet; nothing may be written before `StateTopics.loaded`.
        """
        if not self.partitions:
            raise RuntimeError(f"{self.name} is not loaded yet")
        if partition_key is not None:
            partition = partition_of(partition_key, self.partitions)
        self.written += 1
        self.publisher.submit(Record(self.name, key, value, headers, None, partition), owner, token, internal=True)

    def partition_of(self, key: bytes) -> int:
        """Return the partition of a key that has no `partition_key`; the topic must have been looked up."""
        return partition_of(key, self.partitions)

    def statistics(self, lag: int) -> TopicStatistics:
        """Return the counts so far."""
        return TopicStatistics(self.records, self.failed, self.restarts, self.written, lag)

    def apply_record(self, record: Received) -> None:
        """Apply one record. A bug in `apply` must not stop the table."""
        self.records += 1
        try:
            self.apply(record)
        except Exception as error:  # one record's failure, whatever it is, is contained
            self.failed += 1
            failures.report("state", error, f"{self.name}-{record.partition} offset {record.offset} was not applied")


@dataclass(eq=False)
class StateTopics:
    """All tables of the process, read by one consumer."""

    kafka: ConsumerOptions
    topics: Topics  # declares and finds the topics
    publisher: Publisher  # writes the records
    lookup: Lookup  # finds the topics' ends and ids; stopped by its owner
    spawn: Spawn
    partitions: int  # of a topic that is created
    largest_bytes: int  # the largest record (and request) that a created topic accepts
    # called when a topic is not compacted: nothing is loaded, and the application must end
    failed: Callable[[ConfigError], None]
    loaded: asyncio.Event = field(default_factory=asyncio.Event)  # everything that was stored at the start is applied
    _tables: dict[str, StateTopic] = field(default_factory=dict)
    _positions: dict[TopicPartition, int] = field(default_factory=dict)  # the next offset to apply; absent: beginning
    # where the reading at the start ends, or a later re-read; None: not known yet
    _goals: dict[TopicPartition, int | None] = field(default_factory=dict)
    _rereading: set[TopicPartition] = field(default_factory=set)
    _recreated: RecreatedTopics = field(init=False)
    _was_missing: bool = False  # the reading consumer's last metadata lacked a topic
    _refresh_timer: asyncio.TimerHandle | None = None
    _consumer: AIOKafkaConsumer | None = None
    _task: asyncio.Task[None] | None = None
    _last_warning: tuple[str, str] = ("", "")
    _applied: asyncio.Event = field(default_factory=asyncio.Event)  # replaced after each answer of Kafka

    def open(
        self,
        name: str,  # the topic
        apply: Apply,  # receives each record, in offset order within a partition
        restarted: Restarted,  # called when a recreated topic's partition is being re-read from its beginning
        reread: Reread = lambda partition: None,  # called when that is done
        *,
        retention_ms: int | None = None,  # the least time a record is kept; None: forever
        readable: bool = False,  # clients may read the topic; otherwise its name starts with `__`
    ) -> StateTopic:
        """Declare a table in the topic `name`; call it before `start`."""
        if self._task is not None:
            raise RuntimeError("open tables before the start")
        configs = table_configs(self.largest_bytes, retention_ms)
        self.topics.declare(InternalTopic(name, self.partitions, configs, readable))
        table = StateTopic(name, self.publisher, apply, restarted, reread, expires=retention_ms is not None)
        self._tables[name] = table
        return table

    async def start(self) -> None:
        """Start to read and return immediately; `loaded` is set when everything has been applied.

        Kafka need not be reachable: connecting is retried until it is.
        """
        self._recreated = RecreatedTopics(self.lookup)
        self._recreated.watch(self._tables)
        self._task = self.spawn(keep_running(self._run, "state"))

    async def read_to_end(self, name: str, partition_key: bytes | None = None) -> None:
        """Wait until every record that is in a loaded table now is applied, whichever process wrote it.

        `partition_key`: wait only for its partition, as in `StateTopic.write`. None means the whole table.

        Raises:
            Refused: Kafka does not answer, or the topic does not exist at the moment.
        """
        table = self._tables[name]
        while True:
            every = range(table.partitions)
            numbers = every if partition_key is None else (partition_of(partition_key, table.partitions),)
            restarts = table.restarts
            ends = await self.lookup.ends([TopicPartition(name, number) for number in numbers])
            while self._consumer is None or await self._is_behind(self._consumer, ends):
                if table.restarts != restarts:
                    break  # these ends were the former topic's
                await self._applied.wait()
            else:
                return

    async def _is_behind(self, consumer: AIOKafkaConsumer, ends: Mapping[TopicPartition, int]) -> bool:
        """Whether a record below one of these offsets is not applied yet."""
        for partition, end in ends.items():
            # A recreated topic may have more partitions than are assigned yet.
            if partition not in consumer.assignment() or await consumer.position(partition) < end:
                return True
        return False

    async def stop(self) -> None:
        """Stop reading."""
        if self._refresh_timer is not None:
            self._refresh_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def statistics(self) -> StateStatistics:
        """Return the counts so far."""
        lag = dict.fromkeys(self._tables, 0)
        assigned = self._consumer.assignment() if self._consumer is not None else ()
        for partition, position in self._positions.items():
            end = self._consumer.highwater(partition) if self._consumer and partition in assigned else None
            lag[partition.topic] += max(0, (end or 0) - position)
        tables = {name: table.statistics(lag[name]) for name, table in self._tables.items()}
        return StateStatistics(int(self.loaded.is_set()), tables)

    async def _run(self) -> None:
        try:
            for table in self._tables.values():
                table.partitions = (await self._find_topic(table)).partitions
        except ConfigError as error:
            self.failed(error)
            return
        await keep_consumer(
            lambda: log_consumer(self.kafka, wait_ms=EMPTY_FETCH_MS, on_missing=self.suspect_deletion),
            self._read_all,
            "state",
            self.spawn,
        )

    async def _read_all(self, consumer: AIOKafkaConsumer) -> None:
        on_metadata(consumer, self._check_consumer_metadata)
        try:
            await self._assign_all(consumer)
            self._consumer = consumer
            while True:
                await self._read(consumer)
        finally:
            self._consumer = None

    async def _find_topic(self, table: StateTopic) -> TopicInfo:
        """Find the topic, or create it; retried until Kafka answers.

        Raises:
            ConfigError: the topic is not compacted.
        """
        name = table.name
        while True:
            try:
                info = await self.publisher.topic(name, internal=True)
            except Refused as refused:
                self._warn_once(name, refused.reason)
                await asyncio.sleep(RETRY_S)
                continue
            if info.cleanup is None:
                log.warning("cannot check that a topic is compacted, since describing it is denied", topic=name)
            elif info.cleanup != "compact" and not (table.expires and "compact" in info.cleanup):
                raise ConfigError(
                    f"Kafka topic {name} has cleanup.policy={info.cleanup}: the gateway's state in it would be "
                    "deleted. Set its cleanup.policy to compact"
                )
            return info

    async def _assign_all(self, consumer: AIOKafkaConsumer) -> None:
        """Assign all partitions, each at its last position; those without one start at their beginning."""
        everything = [
            TopicPartition(table.name, number) for table in self._tables.values() for number in range(table.partitions)
        ]
        if not all(self.lookup.identity(name) for name in self._tables):
            # A position belongs to one incarnation of a topic: know its id before the topic can be recreated.
            await self.lookup.refresh()
        if not self._positions:
            self._recreated.check()
        # Asked before anything is fetched: a fetch that waits for data delays all requests behind it.
        unread = [partition for partition in everything if partition not in self._positions]
        if unread:
            self._positions |= await consumer.beginning_offsets(unread)
        if not self.loaded.is_set():
            self._goals = dict.fromkeys(everything)
        if unknown := [partition for partition, goal in self._goals.items() if goal is None]:
            self._goals |= await consumer.end_offsets(unknown)
        consumer.assign(everything)
        for partition in everything:
            consumer.seek(partition, self._positions[partition])
        await self._check_goals(consumer)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        try:
            batches = await poll(consumer, wait_ms=1000)
        except OffsetOutOfRangeError as error:
            await self.lookup.refresh()  # a recreated topic shows in all of its partitions
            await self._restart(consumer, self._recreated.check(), error.args[0])
            return
        if recreated := self._recreated.check():
            await self._restart(consumer, recreated, ())
            return
        self._last_warning = ("", "")
        for partition, records in batches.items():
            table = self._tables[partition.topic]
            for record in records:
                table.apply_record(record)
            self._positions[partition] = records[-1].offset + 1
        self._wake()
        if self._goals:
            await self._check_goals(consumer)
        await asyncio.sleep(0)

    def _wake(self) -> None:
        """Let the waiting calls of `read_to_end` check again."""
        self._applied.set()
        self._applied = asyncio.Event()

    async def _check_goals(self, consumer: AIOKafkaConsumer) -> None:
        """Report re-reads that have reached their goal, even where compaction left no record at the end of the log.

        Set `loaded` when every goal is reached.
        """
        for partition, goal in tuple(self._goals.items()):
            if goal is not None and await consumer.position(partition) >= goal:
                del self._goals[partition]
                if partition in self._rereading:
                    self._rereading.remove(partition)
                    self._tables[partition.topic].reread(partition.partition)
        if not self._goals and not self.loaded.is_set():
            self.loaded.set()
            log.info("state is loaded", records={table.name: table.records for table in self._tables.values()})

    # Topics that are deleted, and recreated by the next write.

    def suspect_deletion(self) -> None:
        """Refresh the metadata soon: there is a sign that a topic was deleted."""
        if self._refresh_timer is None:
            self._refresh_timer = asyncio.get_running_loop().call_later(REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        self._refresh_timer = None
        self.spawn(self.lookup.refresh())

    def _check_consumer_metadata(self, cluster: Any) -> None:
        """Check the consumer's new metadata: a topic that is missing, or is back, may have been recreated."""
        lacks = any(cluster.partitions_for_topic(name) is None for name in self._tables)
        if lacks or self._was_missing:
            self.suspect_deletion()
        self._was_missing = lacks

    async def _restart(
        self, consumer: AIOKafkaConsumer, recreated: Collection[str], outside: Iterable[TopicPartition]
    ) -> None:
        """Re-read recreated topics, and partitions whose log does not have our position, from their beginning."""
        again = {partition for partition in outside if partition.topic not in recreated}
        for name in recreated:
            table = self._tables[name]
            former = table.partitions
            try:
                table.partitions = (await self._find_topic(table)).partitions
            except ConfigError as error:
                log.error("a state topic cannot be used", error=str(error))
            again |= {TopicPartition(name, number) for number in range(max(former, table.partitions))}
        for partition in again:
            table = self._tables[partition.topic]
            log.warning(
                "a partition was recreated, or truncated below its position; re-reading it from its beginning",
                topic=partition.topic,
                partition=partition.partition,
                position=self._positions.pop(partition, 0),
            )
            self._goals.pop(partition, None)
            self._rereading.discard(partition)
            table.restarts += 1
            table.restarted(partition.partition)
            if partition.partition < table.partitions:
                self._goals[partition] = None
                self._rereading.add(partition)
            else:
                table.reread(partition.partition)
        self._wake()
        await self._assign_all(consumer)

    def _warn_once(self, topic: str, reason: str) -> None:
        """Log a reason once, not at each attempt."""
        if (topic, reason) != self._last_warning:
            self._last_warning = (topic, reason)
            log.warning("a state topic cannot be used yet", topic=topic, reason=reason)
