"""What all readers share: opening and closing aiokafka consumers, conversion, and looking up offsets.

aiokafka 0.14 is pinned: the places that reach below its public surface are here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.structs import OffsetAndMetadata

from gateway.failures import failures
from gateway.kafka.client import start_client
from gateway.kafka.contracts import Refused
from gateway.kafka.fetching import convert_arrivals
from gateway.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

ISOLATION: Final = "read_committed"  # records of open or aborted transactions are not messages yet
FETCH_WAIT_MS: Final = 100
"""How long the broker holds an empty fetch. A changed assignment waits for the fetch on its way, since a
connection answers in order: this is the bound on how late a newly watched partition begins to flow."""

FETCH_BYTES: Final = 16 * 1024 * 1024
PARTITION_FETCH_BYTES: Final = 1024 * 1024

GONE_CHECK_S: Final = 0.3  # between two looks whether what is asked for still exists
CHUNK: Final = 500  # aiokafka's getmany is 1.7 times dearer per record without a limit (measured)

ASSIGNORS: Final = (RangePartitionAssignor,)
"""The one strategy that the default settings of the Java client and of librdkafka know too; members of one group
must have one in common. (aiokafka 0.14 joins twice when it is given two.)"""

_METADATA_TRIES: Final = 20
_METADATA_RETRY_S: Final = 0.1

ConsumerOptions = Mapping[str, Any]
"""Connection part of AIOKafkaConsumer's arguments: bootstrap_servers, client_id, security, time-outs."""


def log_consumer(
    kafka: ConsumerOptions,
    *,
    wait_ms: int = FETCH_WAIT_MS,
    fetch_bytes: int = FETCH_BYTES,
    partition_bytes: int = PARTITION_FETCH_BYTES,
    isolation: str = ISOLATION,
) -> AIOKafkaConsumer:
    """A consumer for a manual assignment, not started. A position out of range raises: what it means is ours to judge.

    Args:
        kafka: see `ConsumerOptions`.
        wait_ms: how long the broker holds an empty fetch.
        fetch_bytes: per fetch and broker.
        partition_bytes: per fetch and partition.
        isolation: Kafka's `isolation.level`.
    """
    return AIOKafkaConsumer(
        **kafka,
        group_id=None,
        isolation_level=isolation,
        auto_offset_reset="none",
        fetch_max_wait_ms=wait_ms,
        max_partition_fetch_bytes=partition_bytes,
        fetch_max_bytes=fetch_bytes,
    )


async def start_consumer(consumer: AIOKafkaConsumer, spawn: Spawn) -> None:
    """Start a consumer for somebody who may be cancelled, as `start_client` says. Its `getmany` brings `Received`.

    Raises:
        KafkaError: Kafka is away, or refuses us.
    """
    await start_client(consumer.start, partial(close_consumer, consumer), spawn)
    convert_arrivals(consumer)


async def close_consumer(consumer: AIOKafkaConsumer, timeout: float = 2.0) -> None:
    """Stop a consumer within `timeout` seconds, leaving its group if Kafka answers; also when cancelled meanwhile.

    With Kafka unreachable aiokafka's own `stop` waits for requests that nobody will answer; then its tasks
    are ended and its connections closed. Soon after a start, `stop` lets out the CancelledError of a task of its own
    that it cancelled before its first step; a task group would take that for our end, and say nothing. At other
    times it swallows the one that is meant for us.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        async with asyncio.timeout(timeout):
            await consumer.stop()
    except (TimeoutError, KafkaError, asyncio.CancelledError):
        await _abandon(consumer, min(timeout, 1.0))
    if consumer._fetcher is not None:
        consumer._fetcher._records.clear()  # the consumer is a cycle: what was read ahead would wait for the collector
    if task.cancelling() > cancelled:
        raise asyncio.CancelledError


async def _abandon(consumer: AIOKafkaConsumer, timeout: float) -> None:
    coordinator = consumer._coordinator
    names = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task")
    tasks = [task for name in names if (task := getattr(coordinator, name, None)) is not None]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: the consumer was given up, not its error
    with contextlib.suppress(KafkaError, TimeoutError):
        async with asyncio.timeout(timeout):
            await _leave(consumer)
    if consumer._fetcher is not None:
        with contextlib.suppress(asyncio.CancelledError, KafkaError, TimeoutError):
            async with asyncio.timeout(1.0):
                await consumer._fetcher.close()
    await consumer._client.close()


async def _leave(consumer: AIOKafkaConsumer) -> None:
    """Leave the group in the middle of a rebalance, or of joining it, which would wait for us to take part.

    The answer that we do not wait for any more blocks the connection to the coordinator: it is told over another.
    """
    coordinator = consumer._coordinator
    node, member = getattr(coordinator, "coordinator_id", None), getattr(coordinator, "member_id", None)
    if node is not None and member:
        await consumer._client.send(node, LeaveGroupRequest(coordinator.group_id, member))


def on_metadata(consumer: AIOKafkaConsumer, listener: Callable[[Any], None]) -> None:
    """Call `listener(cluster)` after each metadata update of the consumer."""

    def tell(cluster: Any) -> None:
        try:
            listener(cluster)
        except Exception as error:  # aiokafka's task, which calls us, must not end by it
            failures.tell("metadata", error)

    consumer._client.cluster.add_listener(tell)


def is_broken(consumer: AIOKafkaConsumer) -> bool:
    """Whether a background task of the consumer has ended, so that it will never bring anything again."""
    fetching = consumer._fetcher._fetch_task
    coordinating = getattr(consumer._coordinator, "_coordination_task", None)
    return bool(fetching.done() or (coordinating is not None and coordinating.done()))


async def subscribe(consumer: AIOKafkaConsumer, topics: Collection[str], listener: ConsumerRebalanceListener) -> None:
    """Make `topics` the subscription of a member that has been started; returns when partitions were assigned.

    Raises:
        KafkaError: the group does not take us.
    """
    client = consumer._client
    for _ in range(_METADATA_TRIES):  # who leads the group assigns only what it knows of
        if all(consumer.partitions_for_topic(topic) is not None for topic in topics):
            break
        client.set_topics([*topics])
        await client.force_metadata_update()
        await asyncio.sleep(_METADATA_RETRY_S)
    consumer.subscribe([*topics], listener=listener)
    await consumer._subscription.wait_for_assignment()


async def committed_offsets(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """What the consumer's group has committed for any partitions, assigned or not; those without are left out.

    Raises:
        KafkaError: not allowed.
    """
    if not partitions:
        return {}
    found = await consumer._coordinator.fetch_committed_offsets(list(partitions))
    return {partition: stored.offset for partition, stored in found.items()}


async def committed_positions(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """As `committed_offsets`, with what was committed beside each offset.

    Raises:
        KafkaError: not allowed.
    """
    if not partitions:
        return {}
    found: dict[TopicPartition, OffsetAndMetadata] = await consumer._coordinator.fetch_committed_offsets(
        list(partitions)
    )
    return found


async def commit_offsets(consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, int]) -> None:
    """Commit as a member; unlike the consumer's own `commit` also when partitions are being taken away.

    Raises:
        KafkaError: not committed, as far as we know.
    """
    stored = {partition: OffsetAndMetadata(offset, "") for partition, offset in offsets.items()}
    await consumer._coordinator.commit_offsets(None, stored)


def stop_waiting(consumer: AIOKafkaConsumer) -> None:
    """Let whoever waits in `subscribe` go on without an assignment: none will come any more."""
    consumer._subscription._notify_assignment_waiters()


def rejoin(consumer: AIOKafkaConsumer) -> None:
    """Have the group assigned anew."""
    consumer._coordinator.request_rejoin()


class _Batch:
    """Partitions whose offsets are asked for by one request."""

    __slots__ = ("error", "partitions", "result")

    def __init__(self) -> None:
        self.partitions: set[TopicPartition] = set()
        self.result: dict[TopicPartition, int] | None = None
        self.error: Refused | None = None


class _Gone:
    """Ends a question about offsets when a topic in it has disappeared: aiokafka would ask on until its time is up."""

    def __init__(self, consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]) -> None:
        self.topics: set[str] = set()
        self._client = consumer._client
        self._asked = {partition.topic for partition in partitions}
        self._suspects: set[str] = set()
        self._seen = self._client.cluster._last_successful_refresh_ms
        self._patience: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def watch(self, question: Awaitable[dict[TopicPartition, Any]]) -> dict[TopicPartition, Any] | None:
        """Wait for the answer; None when some of `topics` are gone."""
        try:
            async with asyncio.timeout(None) as self._patience:
                self._check_later()
                return await question
        except TimeoutError:
            if not self.topics:
                raise
            return None
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(GONE_CHECK_S, self._check)

    def _check(self) -> None:
        """A topic that two new answers with metadata lack is gone; what is asked for makes aiokafka refresh them.

        aiokafka follows only the topics that it misses, if any: of the others the metadata say nothing then. (The
        first answer may still be to such a request.)
        """
        followed, cluster = self._client._topics, self._client.cluster
        if cluster._last_successful_refresh_ms != self._seen:
            self._seen = cluster._last_successful_refresh_ms
            missing = {
                topic
                for topic in self._asked
                if (not followed or topic in followed) and cluster.partitions_for_topic(topic) is None
            }
            self.topics = missing & self._suspects
            self._suspects = missing
        if self.topics and self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())
        else:
            self._check_later()


class Lookup:
    """Partitions of topics, and offsets in them, over a connection on which nothing is fetched.

    A fetch that waits for data holds back everything behind it on its connection, so a subscription would
    wait for it. Questions that arrive while one is being asked share the next request.
    """

    def __init__(
        self,
        kafka: ConsumerOptions,
        *,
        spawn: Spawn,
        ensure: Callable[[str], Awaitable[object]] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Take what is needed to connect; the connection is made with the first question.

        Args:
            kafka: see `ConsumerOptions`.
            spawn: starts background work.
            ensure: asked for every topic first; may create it, or raise Refused (the publisher's `topic`).
            timeout_s: how long a question may take before it is Refused as BUSY.
        """
        self._kafka = dict(kafka)
        self._spawn = spawn
        self._ensure = ensure
        self._timeout_s = timeout_s
        self._consumer: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._next_batch = _Batch()
        self._listeners: list[Callable[[Any], None]] = []

    def listen(self, listener: Callable[[Any], None]) -> None:
        """Call `listener(cluster)` after each update; this cluster's metadata covers every topic."""
        self._listeners.append(listener)

    async def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """The partitions of a topic.

        Raises:
            Refused: no legal or public name, unknown, or Kafka does not answer.
        """
        if topic.startswith(INTERNAL_TOPIC_PREFIX):
            raise Refused(Outcome.DENIED, "topics that begin with __ are internal")
        if not is_topic_name(topic):
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{topic!r} is not the name of a topic")
        if self._ensure is not None:
            await self._ensure(topic)
        try:
            async with asyncio.timeout(self._timeout_s):
                consumer = await self._open()
                found = consumer.partitions_for_topic(topic)
                if found is None:
                    await consumer._client.force_metadata_update()
                    found = consumer.partitions_for_topic(topic)
        except (TimeoutError, KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}") from error
        if not found:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {topic!r} does not exist")
        return tuple(TopicPartition(topic, number) for number in sorted(found))

    async def refresh(self) -> None:
        """Fetch the metadata of all topics now; listeners learn of it. Nothing happens when Kafka is away."""
        try:
            async with asyncio.timeout(self._timeout_s):
                consumer = await self._open()
                await consumer._client.force_metadata_update()
        except (TimeoutError, KafkaError):
            return  # the periodic update comes anyway

    async def ends(
        self, partitions: Collection[TopicPartition], *, existing: bool = False
    ) -> dict[TopicPartition, int]:
        """The offsets after the last committed record, asked for after this call.

        Args:
            partitions: asked for.
            existing: leave out those of topics that do not exist any more.

        Raises:
            Refused: Kafka does not answer in time, or a topic does not exist any more.
        """
        batch = self._next_batch
        batch.partitions.update(partitions)
        async with self._asking:
            if batch.error is not None:
                raise batch.error
            if batch.result is None:  # we are the first of this batch, or the first was cancelled
                if batch is self._next_batch:
                    self._next_batch = _Batch()
                try:
                    batch.result = await self._ask("end_offsets", batch.partitions)
                except Refused as error:
                    batch.error = error
                    raise
        if existing:
            partitions = [partition for partition in partitions if partition in batch.result]
        return _all_of(partitions, batch.result)

    async def beginnings(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets of the first records still there.

        Raises:
            Refused: Kafka does not answer in time, or a topic does not exist any more.
        """
        async with self._asking:
            return _all_of(partitions, await self._ask("beginning_offsets", partitions))

    async def since(self, partitions: Collection[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        """The offsets of the first records that are not older than a time; a partition without one is left out.

        Args:
            partitions: asked for.
            timestamp: ms since the epoch.

        Raises:
            Refused: Kafka does not answer in time, or a topic does not exist any more.
        """
        async with self._asking:
            found = await self._ask("offsets_for_times", partitions, max(0, timestamp))
        found = _all_of(partitions, found)
        return {partition: place.offset for partition, place in found.items() if place is not None}

    async def _ask(
        self, method: str, partitions: Collection[TopicPartition], timestamp: int | None = None
    ) -> dict[TopicPartition, Any]:
        """Ask; the partitions of topics that are gone are left out."""
        offsets: dict[TopicPartition, Any] | None = {}
        left = list(partitions)
        try:
            async with asyncio.timeout(self._timeout_s):
                consumer = await self._open()
                while left:
                    asked = left if timestamp is None else dict.fromkeys(left, timestamp)
                    gone = _Gone(consumer, left)
                    offsets = await gone.watch(getattr(consumer, method)(asked))
                    if offsets is not None:
                        break
                    left = [partition for partition in left if partition.topic not in gone.topics]
                    consumer._client.set_topics([])
        except (TimeoutError, KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}") from error
        finally:
            # A missing leader makes aiokafka follow that one topic only; we follow all of them.
            if self._consumer is not None and self._consumer._client._topics:
                self._consumer._client.set_topics([])
        return offsets or {}

    async def _open(self) -> AIOKafkaConsumer:
        async with self._opening:
            if self._consumer is None:
                consumer = AIOKafkaConsumer(**self._kafka, group_id=None, isolation_level=ISOLATION)
                await start_consumer(consumer, self._spawn)
                try:
                    on_metadata(consumer, self._updated)
                    # The first answer of aiokafka's bootstrap lists brokers only.
                    await consumer._client.force_metadata_update()
                except BaseException:
                    await close_consumer(consumer)
                    raise
                self._consumer = consumer
            return self._consumer

    def _updated(self, cluster: Any) -> None:
        for listener in self._listeners:
            listener(cluster)

    async def stop(self) -> None:
        """Close the connection."""
        if self._consumer is not None:
            await close_consumer(self._consumer)
            self._consumer = None


def _all_of(partitions: Collection[TopicPartition], found: Mapping[TopicPartition, Any]) -> dict[TopicPartition, Any]:
    """What was found; Refused when there is none for a partition."""
    for partition in partitions:
        if partition not in found:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {partition.topic!r} does not exist any more")
    return {partition: found[partition] for partition in partitions}
