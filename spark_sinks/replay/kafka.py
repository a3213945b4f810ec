"""Kafka access of a replay: topics and their limits, and reading records in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError

from kafka_records.fetched_records import Unreadable, convert_arrivals
from spark_sinks.replay.items import Place
from spark_sinks.replay.order import Merge

PAGE: Final = 2_000
"""Records of one partition that are read together."""
_FOREVER: Final = 2**63 - 1
_MAX_MESSAGE_BYTES: Final = 1_048_588  # Kafka's own default


class ReplayTarget(msgspec.Struct, frozen=True):
    """The limits of a target topic."""

    name: str
    partitions: int
    max_message_bytes: int = _MAX_MESSAGE_BYTES
    own_time: bool = True  # False if Kafka sets the timestamp itself (LogAppendTime)
    before_ms: int = _FOREVER  # how far in the past a timestamp may be
    after_ms: int = _FOREVER  # how far in the future
    retention_ms: int = -1  # -1 means forever

    def timestamp(self, wanted: int | None, now: int) -> int | None:
        """Return the wanted timestamp if the topic accepts it, else None, which means now."""
        if wanted is None or not self.own_time or not now - self.before_ms <= wanted <= now + self.after_ms:
            return None
        return wanted

    def forgets(self, timestamp: int | None, now: int) -> bool:
        """Whether a record with this timestamp would be deleted at Kafka's next retention check."""
        return timestamp is not None and 0 <= self.retention_ms < now - timestamp


class ReplayTopics:
    """Reads topic metadata, and creates topics."""

    def __init__(self, admin: AIOKafkaAdminClient) -> None:
        self._admin = admin

    async def known(self, names: Collection[str]) -> dict[str, ReplayTarget]:
        """Return the topics of `names` that exist, with their limits."""
        there = sorted(set(names) & set(await self._admin.list_topics()))
        if not there:
            return {}
        counts = {topic["topic"]: len(topic["partitions"]) for topic in await self._admin.describe_topics(there)}
        asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in there]
        configs: dict[str, dict[str, str]] = {}
        for answer in await self._admin.describe_configs(asked):
            for error, _, _, name, entries in answer.resources:
                configs[name] = {} if error else {key: value for key, value, *_ in entries}
        return {name: _target(name, counts[name], configs.get(name, {})) for name in there}

    async def make(self, name: str, settings: Mapping[str, str]) -> None:
        """Create a topic with one partition unless it exists."""
        if name in await self._admin.list_topics():
            return
        brokers = (await self._admin.describe_cluster())["brokers"]
        with contextlib.suppress(TopicAlreadyExistsError):
            await self._admin.create_topics([NewTopic(name, 1, min(3, len(brokers)), topic_configs=dict(settings))])
        while name not in await self.known([name]):  # noqa: ASYNC110 - Kafka does not notify
            await asyncio.sleep(0.1)


def _target(name: str, partitions: int, configs: Mapping[str, str]) -> ReplayTarget:
    """Build a target; settings that we are not allowed to read have Kafka's defaults."""

    def number(key: str, default: int) -> int:
        return int(configs.get(key) or default)

    return ReplayTarget(
        name,
        partitions,
        number("max.message.bytes", _MAX_MESSAGE_BYTES),
        configs.get("message.timestamp.type") != "LogAppendTime",
        number("message.timestamp.before.max.ms", _FOREVER),
        number("message.timestamp.after.max.ms", _FOREVER),
        number("retention.ms", -1) if "delete" in configs.get("cleanup.policy", "") else -1,
    )


class CommittedReader(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka carries no types
    """A consumer that reads committed records from the beginning, and steps over what nothing can read (ADR 0092).

    Attributes:
        unreadable: what it has stepped over.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(
            **settings,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_partition_fetch_bytes=4 << 20,
            fetch_max_wait_ms=20,  # the records exist already, and other requests wait behind a fetch on the connection
        )
        self.unreadable: list[Unreadable] = []

    async def start(self) -> None:
        """Start the consumer, which steps over what nothing can read."""
        await super().start()
        convert_arrivals(self, self.unreadable.append)


def partitions_of(places: Iterable[Place]) -> list[TopicPartition]:
    """Convert to aiokafka's type."""
    return [TopicPartition(*place) for place in places]


class LogReader:
    """Reads offset ranges of some partitions, merged by time (`Merge`).

    Args:
        consumer: a started consumer; its assignment is changed.
        begins: the first offset of each partition.
        ends: the end offset of each partition, exclusive.
    """

    def __init__(self, consumer: CommittedReader, begins: Mapping[Place, int], ends: Mapping[Place, int]) -> None:
        self.merge = Merge(begins, ends)
        self._ends = ends
        consumer.unreadable.clear()
        self._consumer = consumer
        partitions = partitions_of(self.merge.waiting)
        if partitions:  # aiokafka misses a stop right after an assignment, and would never end
            consumer.assign(partitions)
        for partition in partitions:
            consumer.seek(partition, begins[Place(*partition)])

    async def records(self) -> AsyncIterator[Any]:
        """Yield all records."""
        while await self.next_time() is not None:
            yield self.merge.pop()

    def unreadable(self) -> list[Unreadable]:
        """Return what nothing can read below the positions of `merge`; each once."""
        now, later = list[Unreadable](), list[Unreadable]()
        for gap in self._consumer.unreadable:
            place = Place(*gap.partition)
            if gap.first < min(self.merge.positions[place], self._ends[place]):
                now.append(gap)
            else:
                later.append(gap)
        self._consumer.unreadable[:] = later
        return now

    async def next_time(self) -> int | None:
        """Read until the next record's time is known and return it; None if no record is left."""
        merge = self.merge
        while merge.waiting:
            wanted = partitions_of(merge.waiting)
            records = await self._consumer.getmany(*wanted, timeout_ms=500, max_records=PAGE * len(wanted))
            for partition in wanted:
                behind = await self._consumer.position(partition)
                merge.feed(Place(*partition), records.get(partition, ()), behind)
        return merge.peek()
