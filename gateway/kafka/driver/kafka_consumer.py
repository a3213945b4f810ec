"""aiokafka's consumers as the readers need them: made, polled, closed, and what the library has no public verb for.

`lifecycle` says how a reader's consumer begins and is replaced; `private_parts` lists the private parts touched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.structs import OffsetAndMetadata

from gateway.failures import failures
from mapping.record import Received

ISOLATION: Final = "read_committed"  # records of open or aborted transactions are not messages yet
FETCH_WAIT_MS: Final = 100
"""How long the broker holds an empty fetch. A changed assignment waits for the fetch on its way, since a
connection answers in order: this is the bound on how late a newly watched partition begins to flow."""

FETCH_WAIT_MOST_MS: Final = 1000
"""The same for a reader of very many partitions, each of which every one of aiokafka's fetches names."""

FETCH_BYTES: Final = 16 * 1024 * 1024
PARTITION_FETCH_BYTES: Final = 1024 * 1024

CHUNK: Final = 500  # aiokafka's getmany is 1.7 times dearer per record without a limit (measured)

ASSIGNORS: Final = (RangePartitionAssignor,)
"""The one strategy that the default settings of the Java client and of librdkafka know too; members of one group
must have one in common. (aiokafka 0.14 joins twice when it is given two.)"""

MISSING_S: Final = 2.0
"""Between two looks for a topic that is not there."""

_METADATA_TRIES: Final = 20
_METADATA_RETRY_S: Final = 0.1

ConsumerOptions = Mapping[str, Any]
"""Connection part of AIOKafkaConsumer's arguments: bootstrap_servers, client_id, security, time-outs."""


def fetch_wait_ms(partitions: int) -> int:
    """How long the broker may hold an empty fetch of so many partitions, so that an idle reader costs little CPU."""
    return min(FETCH_WAIT_MOST_MS, max(FETCH_WAIT_MS, partitions // 10))


def set_fetch_wait(consumer: AIOKafkaConsumer, wait_ms: int) -> None:
    """Have the next fetches of a started consumer held for so long when they are empty."""
    consumer._fetcher._fetch_max_wait_ms = wait_ms


def log_consumer(
    kafka: ConsumerOptions,
    *,
    wait_ms: int = FETCH_WAIT_MS,
    fetch_bytes: int = FETCH_BYTES,
    partition_bytes: int = PARTITION_FETCH_BYTES,
    isolation: str = ISOLATION,
) -> AIOKafkaConsumer:
    """A consumer for a manual assignment, not started.

    A position out of range raises: what it means is ours to judge. The broker holds an empty fetch for `wait_ms`;
    `fetch_bytes` are per fetch and broker, `partition_bytes` per partition.
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


NO_POLL_LIMIT_MS: Final = 2**31 - 1
"""A group must not lose us because clients are slow; our being alive is what the heartbeats say."""

HEARTBEAT_MS: Final = 1000
"""A rebalance waits until the last member has learnt of it by its heartbeat, and stops the group so long."""


def group_consumer(kafka: ConsumerOptions, group: str, *, session_timeout_ms: int) -> AIOKafkaConsumer:
    """A member of a group, not started, whose positions and commits are set by who reads."""
    return AIOKafkaConsumer(
        **kafka,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # retention has passed us: what is left
        isolation_level=ISOLATION,
        partition_assignment_strategy=ASSIGNORS,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_partition_fetch_bytes=256 * 1024,
        fetch_max_bytes=4 * 1024 * 1024,
        session_timeout_ms=session_timeout_ms,
        heartbeat_interval_ms=min(HEARTBEAT_MS, session_timeout_ms // 3),
        rebalance_timeout_ms=max(30_000, session_timeout_ms),
        max_poll_interval_ms=NO_POLL_LIMIT_MS,
    )


async def poll(consumer: AIOKafkaConsumer, *, wait_ms: int, most: int = CHUNK) -> dict[TopicPartition, list[Received]]:
    """The next records of each partition; none when `wait_ms` have passed.

    Raises:
        KafkaError: as `getmany`; or the consumer's background tasks have ended, so that it never brings anything again.
    """
    found: dict[TopicPartition, list[Received]] = await consumer.getmany(timeout_ms=wait_ms, max_records=most)
    if not found and is_broken(consumer):
        raise KafkaError("the consumer's fetching has ended")
    return found


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
    # Guarded: aiokafka's task, which calls us, must not end by it.
    consumer._client.cluster.add_listener(partial(failures.guard, "metadata", listener))


def follow_missing(consumer: AIOKafkaConsumer, doubted: Callable[[], object] | None = None) -> None:
    """Look again for topics that the consumer of a group wants and that are not there: they may be made again.

    aiokafka itself would look when its metadata are old. `doubted` is called with each look.
    """
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.TimerHandle] = []

    def again() -> None:
        waiting.clear()
        if not consumer._closed:
            consumer._client.force_metadata_update()
            if doubted is not None:
                doubted()

    def look(cluster: Any) -> None:
        missing = any(cluster.partitions_for_topic(topic) is None for topic in consumer.subscription())
        if missing and not waiting and not consumer._closed:
            waiting.append(loop.call_later(MISSING_S, again))

    on_metadata(consumer, look)


def next_offset(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int | None:
    """The offset behind all that a started consumer has given out, transaction markers included; None: not known."""
    if not consumer._subscription.is_assigned(partition):
        return None
    found: int | None = consumer._subscription.subscription.assignment.state_value(partition)._position
    return found


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


async def committed_positions(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """What the consumer's group has committed for any partitions, assigned or not; those without are left out.

    Raises:
        KafkaError: not allowed.
    """
    if not partitions:
        return {}
    found: dict[TopicPartition, OffsetAndMetadata] = await consumer._coordinator.fetch_committed_offsets(
        list(partitions)
    )
    return found


async def commit_offsets(consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
    """Commit as a member; unlike the consumer's own `commit` also when partitions are being taken away.

    Raises:
        KafkaError: not committed, as far as we know.
    """
    await consumer._coordinator.commit_offsets(None, dict(offsets))


def stop_waiting(consumer: AIOKafkaConsumer) -> None:
    """Let whoever waits in `subscribe` go on without an assignment: none will come any more."""
    consumer._subscription._notify_assignment_waiters()


def rejoin(consumer: AIOKafkaConsumer) -> None:
    """Have the group assigned anew."""
    consumer._coordinator.request_rejoin()
