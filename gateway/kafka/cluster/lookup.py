"""Look up topics' partitions and offsets, over connections on which nothing is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.brokers import Brokers
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.driver.lifecycle import OnDemand
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

LEADER_TIMEOUT_S: Final = 2.0
"""How long a leader may take to answer a request with `led`, which can do without it."""
RETRY_S: Final = 0.1
"""Pause before a request is repeated whose partitions have no leader or a new one."""


class _LookupBatch(msgspec.Struct, eq=False):
    """Partitions whose end offsets are requested together, and the task that requests them."""

    partitions: set[TopicPartition] = set()
    asking: asyncio.Task[dict[TopicPartition, int] | Refused] | None = None


class Lookup:
    """Looks up partitions and offsets.

    It has connections of its own, since a fetch that waits for data delays everything behind it on its connection.
    Calls of `ends` that arrive while a request is in flight share the next one.
    """

    def __init__(
        self,
        kafka: ConsumerOptions,
        *,
        spawn: Spawn,
        ensure: Callable[[str], Awaitable[object]] | None = None,
        timeout_s: float = 8.0,
    ) -> None:
        """Connect on first use.

        `partitions` calls `ensure` first, which may create the topic or raise Refused (`Topics.get`). A call is Refused
        as BUSY after `timeout_s`.
        """
        options = dict(kafka)
        self._client: OnDemand[Brokers] = OnDemand(lambda: Brokers(self._updated, **options), self._begin, spawn)
        self._spawn = spawn
        self._ensure = ensure
        self._timeout_s = timeout_s
        self._asking = asyncio.Lock()
        self.topics: Mapping[str, wire.Topic] = {}  # that exist; a new object with each metadata update
        self._next_batches = {False: _LookupBatch(), True: _LookupBatch()}  # by `led`
        self._listeners: list[Callable[[Brokers], None]] = []
        self.requests = 0  # offset requests sent, plus metadata answers

    def add_listener(self, listener: Callable[[Brokers], None]) -> None:
        """Call `listener(brokers)` after each metadata update, which covers every topic."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[Brokers], None]) -> None:
        """Stop calling `listener`."""
        self._listeners.remove(listener)

    async def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Return the partitions of a topic that a client has named.

        Raises:
            Refused: the name is illegal or internal, the topic does not exist, or Kafka does not answer.
        """
        if topic.startswith(INTERNAL_TOPIC_PREFIX):
            raise Refused(Outcome.DENIED, "topics that begin with __ are internal")
        if not is_topic_name(topic):
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{topic!r} is not the name of a topic")
        if self._ensure is not None:
            await self._ensure(topic)
        topics = await self.existing((topic,))
        if topic not in topics:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {topic!r} does not exist")
        return topics[topic]

    async def existing(self, topics: Collection[str]) -> dict[str, tuple[TopicPartition, ...]]:
        """Return the partitions of those topics that exist. Metadata are requested only if a topic is not known.

        Raises:
            Refused: Kafka does not answer.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._client.get()
                for _ in range(2):  # the first answer may be to a request from before this call
                    if all(topic in self.topics for topic in topics):
                        break
                    await self._update(client)
        except (TimeoutError, KafkaError) as error:
            raise _no_answer(error) from error
        return {
            topic: tuple(TopicPartition(topic, number) for number in range(len(metadata.leaders)))
            for topic in topics
            if (metadata := self.topics.get(topic)) is not None
        }

    def identity(self, topic: str) -> bytes:
        """Return a topic's id by the last metadata; b"" when unknown. A re-created topic has another id."""
        metadata = self.topics.get(topic)
        return b"" if metadata is None else metadata.id

    async def refresh(self) -> None:
        """Update the metadata of all topics now, which calls the listeners. Does nothing when Kafka is away."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._update(await self._client.get())
        except (TimeoutError, KafkaError):
            return  # the periodic update follows anyway

    async def ends(
        self, partitions: Collection[TopicPartition], *, existing: bool = False, led: bool = False
    ) -> dict[TopicPartition, int]:
        """Return the offsets after the last committed record, by a request that is sent after this call.

        `existing` leaves out partitions that no longer exist; `led` also those without a leader, or whose leader does
        not answer within `LEADER_TIMEOUT_S`.

        Raises:
            Refused: Kafka does not answer in time, or a topic no longer exists.
        """
        batch = self._next_batches[led]
        batch.partitions.update(partitions)
        if batch.asking is None:
            batch.asking = self._spawn(self._ask_ends(batch, led))
        answer = await asyncio.shield(batch.asking)  # other callers wait for it too
        if isinstance(answer, Refused):
            raise answer.bare()
        return _select(partitions, answer, existing=existing or led)

    async def _ask_ends(self, batch: _LookupBatch, led: bool) -> dict[TopicPartition, int] | Refused:
        """Request a batch once the one before is answered. A refusal is returned: all callers of the batch share it."""
        async with self._asking:
            self._next_batches[led] = _LookupBatch()
            try:
                return await self._ask(wire.LATEST, batch.partitions, led=led)
            except Refused as refused:
                return refused.bare()

    async def beginnings(
        self, partitions: Collection[TopicPartition], *, existing: bool = False, led: bool = False
    ) -> dict[TopicPartition, int]:
        """Return the offsets of the first records still stored. Arguments and errors are those of `ends`."""
        async with self._asking:
            offsets = await self._ask(wire.EARLIEST, partitions, led=led)
        return _select(partitions, offsets, existing=existing or led)

    async def since_leaderless(self, since: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return start offsets for readers that joined while their partitions had no leader; only those led again.

        `since` has the time of joining by partition, in epoch ms. Nothing is stored without a leader, so a reader
        starts at the first record that is not older than its joining.

        Raises:
            Refused: Kafka does not answer in time.
        """
        ends = await self.ends(since, led=True)
        offsets = dict(ends)
        for timestamp in {since[place] for place in ends}:
            offsets |= await self.since([place for place in ends if since[place] == timestamp], timestamp, led=True)
        return offsets

    def has(self, place: TopicPartition) -> bool:
        """Whether the partition exists by the last metadata, with or without a leader. Requests nothing."""
        topic = self.topics.get(place.topic)
        return topic is not None and place.partition < len(topic.leaders)

    async def since(
        self, partitions: Collection[TopicPartition], timestamp: int, *, led: bool = False
    ) -> dict[TopicPartition, int]:
        """Return the offsets of the first records not older than `timestamp` (epoch ms), where there is one.

        `led` is as in `ends`.

        Raises:
            Refused: Kafka does not answer in time, or a topic no longer exists.
        """
        async with self._asking:
            offsets = _select(partitions, await self._ask(max(0, timestamp), partitions, led=led), existing=led)
        return {partition: offset for partition, offset in offsets.items() if offset != wire.NO_OFFSET}

    async def _ask(
        self, timestamp: int, partitions: Collection[TopicPartition], *, led: bool = False
    ) -> dict[TopicPartition, int]:
        """Request offsets from the leaders. Partitions that two metadata updates in a row lack are left out."""
        offsets: dict[TopicPartition, int] = {}
        left = set(partitions)
        lacking: set[TopicPartition] = set()
        now = asyncio.get_running_loop().time
        soon = now() + LEADER_TIMEOUT_S
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._client.get()
                while True:
                    try:
                        async with asyncio.timeout(LEADER_TIMEOUT_S if led else None):
                            await self._ask_leaders(client, timestamp, left, offsets)
                    except TimeoutError:
                        pass  # go on with the leaders that have answered
                    left -= offsets.keys()
                    if not left:
                        return offsets
                    if await self._update(client):
                        missing = {place for place in left if not self.has(place)}
                        left -= missing & lacking
                        lacking = missing
                        if led and all(client.leader(*place) is None for place in left - missing):
                            left &= missing
                        if not left or (led and now() >= soon):
                            return offsets
                    await asyncio.sleep(RETRY_S)
        except (TimeoutError, KafkaError) as error:
            raise _no_answer(error) from error

    async def _ask_leaders(
        self,
        client: Brokers,
        timestamp: int,
        partitions: Iterable[TopicPartition],
        offsets: dict[TopicPartition, int],
    ) -> None:
        """Send one request to each leader and add the offsets to `offsets`."""
        by_leader: dict[int, list[TopicPartition]] = {}
        for place in partitions:
            leader = client.leader(place.topic, place.partition)
            if leader is not None:
                by_leader.setdefault(leader, []).append(place)
        self.requests += len(by_leader)

        async def ask(leader: int, places: list[TopicPartition]) -> None:
            try:
                answer = await client.send(leader, wire.list_offsets_request(places, timestamp))
            except KafkaError:
                return  # its partitions may have a new leader
            for place, error, offset in wire.read_offsets(answer):
                if not error:
                    offsets[place] = offset
                elif error == TopicAuthorizationFailedError.errno:
                    raise Refused(Outcome.DENIED, f"Kafka does not let us read topic {place.topic!r}")

        await asyncio.gather(*(ask(leader, places) for leader, places in by_leader.items()))

    async def _update(self, client: Brokers) -> bool:
        """Update the metadata; concurrent callers share the update. False when no broker has answered."""
        updated: bool = await client.force_metadata_update()
        return updated

    async def _begin(self, client: Brokers) -> None:
        await client.bootstrap()
        await self._update(client)  # aiokafka's bootstrap requests only the brokers

    def _updated(self, client: Brokers) -> None:
        self.topics = client.topics
        self.requests += 1
        for listener in tuple(self._listeners):
            failures.guard("metadata", listener, client)  # an exception would end aiokafka's task, the caller

    async def stop(self) -> None:
        """Close the connection."""
        await self._client.stop()


def _no_answer(error: BaseException) -> Refused:
    return Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}")


def _select(
    partitions: Collection[TopicPartition], offsets: Mapping[TopicPartition, int], *, existing: bool = False
) -> dict[TopicPartition, int]:
    """Return the offsets of `partitions`. Raises Refused when one is missing, unless `existing`."""
    for partition in partitions:
        if partition not in offsets and not existing:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {partition.topic!r} no longer exists")
    return {partition: offsets[partition] for partition in partitions if partition in offsets}
