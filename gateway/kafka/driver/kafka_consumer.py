"""Create, poll and close aiokafka consumers, and do what the library has no public method for.

`lifecycle` starts and replaces the readers' consumers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.driver.fetch.fetch_sessions import SessionFetcher
from gateway.runtime.failures import failures
from mapping.record import Received

ISOLATION: Final = "read_committed"  # records of open or aborted transactions are not messages yet
FETCH_WAIT_MS: Final = 100
"""How long the broker holds an empty fetch. A connection answers in order, so a changed assignment waits for the
fetch in flight: this bounds the delay before a newly watched partition is read."""

FETCH_WAIT_MOST_MS: Final = 1000
"""The upper limit of `fetch_wait_ms`, for readers of very many partitions: each aiokafka fetch names all of them."""

FETCH_BYTES: Final = 16 * 1024 * 1024
PARTITION_FETCH_BYTES: Final = 1024 * 1024

CHUNK: Final = 500  # without a limit aiokafka's getmany costs 1.7 times as much per record (measured)

ASSIGNORS: Final = (RangePartitionAssignor,)
"""The only strategy that is also in the default settings of the Java client and of librdkafka; members of a group
must have one in common. (aiokafka 0.14 joins twice when it is given two.)"""

MISSING_S: Final = 2.0
"""Interval at which metadata are refreshed while a subscribed topic does not exist."""

_METADATA_TRIES: Final = 20
_METADATA_RETRY_S: Final = 0.1

ConsumerOptions = Mapping[str, Any]
"""The connection arguments of AIOKafkaConsumer: bootstrap_servers, client_id, security, timeouts."""


def fetch_wait_ms(partitions: int) -> int:
    """Return how long the broker may hold an empty fetch of this many partitions; an idle reader shall cost little."""
    return min(FETCH_WAIT_MOST_MS, max(FETCH_WAIT_MS, partitions // 10))


def set_fetch_wait(consumer: AIOKafkaConsumer, wait_ms: int) -> None:
    """Set how long brokers hold the next empty fetches of a started consumer."""
    consumer._fetcher._fetch_max_wait_ms = wait_ms


def log_consumer(
    kafka: ConsumerOptions,
    *,
    wait_ms: int = FETCH_WAIT_MS,
    fetch_bytes: int = FETCH_BYTES,
    partition_bytes: int = PARTITION_FETCH_BYTES,
    isolation: str = ISOLATION,
    on_missing: Callable[[], None] | None = None,
) -> AIOKafkaConsumer:
    """Create a consumer for a manual assignment, not started.

    A position out of range raises, so that the reader can handle it. The broker holds an empty fetch for `wait_ms`;
    `fetch_bytes` limits a fetch from one broker, `partition_bytes` each partition in it. With `on_missing` it uses
    fetch sessions; see `SessionFetcher`.
    """
    consumer = AIOKafkaConsumer(
        **kafka,
        group_id=None,
        isolation_level=isolation,
        auto_offset_reset="none",
        fetch_max_wait_ms=wait_ms,
        max_partition_fetch_bytes=partition_bytes,
        fetch_max_bytes=fetch_bytes,
    )
    if on_missing is not None:
        consumer._client.new_fetcher = partial(SessionFetcher, on_missing=on_missing)
    return consumer


NO_POLL_LIMIT_MS: Final = 2**31 - 1
"""Slow clients must not cost us the group membership; the heartbeats show that the member is alive."""

HEARTBEAT_MS: Final = 1000
"""Members learn of a rebalance from a heartbeat's answer, and the group stands still until the last has rejoined."""


def group_consumer(kafka: ConsumerOptions, group: str, *, session_timeout_ms: int) -> AIOKafkaConsumer:
    """Create a group member, not started. The reader sets its positions and commits."""
    return AIOKafkaConsumer(
        **kafka,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # retention has deleted the position: go on with the oldest record left
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


class OwnCoordinator(GroupCoordinator):  # type: ignore[misc]  # aiokafka has no types
    """A group's coordinator whose commits may be given up, and have a retention time (OffsetCommit, versions 2 to 4).

    Without one, Kafka forgets the offsets of a group that has no members after `offsets.retention.minutes`, a week.
    """

    kept_ms = OffsetCommitRequest.DEFAULT_RETENTION_TIME

    async def _send_req(self, request: Any) -> Any:
        if isinstance(request, OffsetCommitRequest):
            request._retention_time = self.kept_ms
        return await super()._send_req(request)

    async def _do_commit_offsets(self, assignment: Any, offsets: Any) -> None:
        # This is a task of its own. It goes on when its caller stops waiting; then nobody is told how it ends.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await super()._do_commit_offsets(assignment, offsets)


def use_own_coordinator(consumer: AIOKafkaConsumer) -> None:
    """Give a started consumer the coordinator above, if it is a member of a group."""
    if isinstance(consumer._coordinator, GroupCoordinator):
        consumer._coordinator.__class__ = OwnCoordinator


def keep_commits(consumer: AIOKafkaConsumer, kept_ms: int) -> None:
    """Have Kafka keep what a started member commits for this many milliseconds after the commit."""
    consumer._coordinator.kept_ms = kept_ms


async def poll(consumer: AIOKafkaConsumer, *, wait_ms: int, most: int = CHUNK) -> dict[TopicPartition, list[Received]]:
    """Return the next records of each partition; empty when none arrive within `wait_ms`.

    Raises:
        KafkaError: as `getmany`, or a background task of the consumer has ended, so that it can never fetch again.
    """
    records: dict[TopicPartition, list[Received]] = await consumer.getmany(timeout_ms=wait_ms, max_records=most)
    if not records and is_broken(consumer):
        raise KafkaError("a background task of the consumer has ended")
    return records


async def close_consumer(consumer: AIOKafkaConsumer, timeout: float = 2.0) -> None:
    """Stop a consumer within `timeout` seconds, even if cancelled meanwhile. Leaves the group if Kafka answers.

    While Kafka is unreachable, aiokafka's `stop` waits for answers that never come; so after `timeout` its tasks are
    cancelled and its connections closed here. Soon after a start, `stop` raises the CancelledError of one of its own
    tasks, cancelled before that task's first step; a task group would silently take it for a cancellation of the
    caller. At other times `stop` swallows a cancellation that is meant for the caller.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        async with asyncio.timeout(timeout):
            await consumer.stop()
    except (TimeoutError, KafkaError, asyncio.CancelledError):
        await _abandon(consumer, min(timeout, 1.0))
    finally:
        cut_connections(consumer._client)  # cancelled again, or an error that nobody foresaw
    if consumer._fetcher is not None:
        consumer._fetcher._records.clear()  # the consumer is a reference cycle and would keep its prefetched records
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
            task.exception()  # retrieved, or asyncio would log it
    with contextlib.suppress(KafkaError, TimeoutError):
        async with asyncio.timeout(timeout):
            await _leave(consumer)
    if consumer._fetcher is not None:
        with contextlib.suppress(asyncio.CancelledError, KafkaError, TimeoutError):
            async with asyncio.timeout(1.0):
                await consumer._fetcher.close()
    await consumer._client.close()


def cut_connections(client: AIOKafkaClient) -> None:
    """Close a client's connections without waiting, and let it make no more; without effect on a closed client."""
    if client._sync_task is not None:
        client._sync_task.cancel()
        client._sync_task = None
    for connection in tuple(client._conns.values()):
        connection.close()


async def _leave(consumer: AIOKafkaConsumer) -> None:
    """Leave the group, also during a rebalance or a join, which would otherwise wait for this member.

    An unanswered join request blocks the coordinator's connection, so the request goes over another connection.
    """
    coordinator = consumer._coordinator
    node, member = getattr(coordinator, "coordinator_id", None), getattr(coordinator, "member_id", None)
    if node is not None and member:
        await consumer._client.send(node, LeaveGroupRequest(coordinator.group_id, member))


def on_metadata(consumer: AIOKafkaConsumer, listener: Callable[[Any], None]) -> None:
    """Call `listener(cluster)` after each metadata update of the consumer."""
    # Guarded: an exception would end aiokafka's task, which calls the listener.
    consumer._client.cluster.add_listener(partial(failures.guard, "metadata", listener))


def follow_missing(consumer: AIOKafkaConsumer, on_missing: Callable[[], object]) -> None:
    """Refresh the metadata every `MISSING_S` while a topic of the subscription is missing: it may be re-created.

    aiokafka itself would refresh them only at their maximum age. `on_missing` is called with each refresh.
    """
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.TimerHandle] = []

    def again() -> None:
        waiting.clear()
        if not consumer._closed:
            consumer._client.force_metadata_update()
            on_missing()

    def look(cluster: Any) -> None:
        missing = any(cluster.partitions_for_topic(topic) is None for topic in consumer.subscription())
        if missing and not waiting and not consumer._closed:
            waiting.append(loop.call_later(MISSING_S, again))

    on_metadata(consumer, look)


def next_offset(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int | None:
    """Return the offset after all that the consumer has returned, transaction markers included; None when unknown."""
    if not consumer._subscription.is_assigned(partition):
        return None
    offset: int | None = consumer._subscription.subscription.assignment.state_value(partition)._position
    return offset


def is_broken(consumer: AIOKafkaConsumer) -> bool:
    """Whether a background task of the consumer has ended, so that it can never fetch again."""
    fetching = consumer._fetcher._fetch_task
    coordinating = getattr(consumer._coordinator, "_coordination_task", None)
    return bool(fetching.done() or (coordinating is not None and coordinating.done()))


async def subscribe(consumer: AIOKafkaConsumer, topics: Collection[str], listener: ConsumerRebalanceListener) -> None:
    """Subscribe a started group member to `topics` and wait for its assignment.

    Raises:
        KafkaError: the group rejects the member.
    """
    client = consumer._client
    for _ in range(_METADATA_TRIES):  # the group leader assigns only topics that are in its metadata
        if all(consumer.partitions_for_topic(topic) is not None for topic in topics):
            break
        client.set_topics([*topics])
        await client.force_metadata_update()
        await asyncio.sleep(_METADATA_RETRY_S)
    consumer.subscribe([*topics], listener=listener)
    await until_assigned(consumer)


async def until_assigned(consumer: AIOKafkaConsumer) -> None:
    """Wait until a subscribed member has its first assignment.

    Raises:
        KafkaError: the group rejects the member.
    """
    await consumer._subscription.wait_for_assignment()


async def committed_positions(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the group's committed offsets of any partitions, assigned or not; those without one are left out.

    Raises:
        KafkaError: not authorized.
    """
    if not partitions:
        return {}
    offsets: dict[TopicPartition, OffsetAndMetadata] = await consumer._coordinator.fetch_committed_offsets(
        list(partitions)
    )
    return offsets


async def commit_offsets(consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
    """Commit as a member; unlike the consumer's own `commit` also while partitions are being revoked.

    Raises:
        KafkaError: not committed, as far as is known.
    """
    await consumer._coordinator.commit_offsets(None, dict(offsets))


def stop_waiting(consumer: AIOKafkaConsumer) -> None:
    """Let a pending `subscribe` return without an assignment: none will come any more."""
    consumer._subscription._notify_assignment_waiters()


def rejoin(consumer: AIOKafkaConsumer) -> None:
    """Make the group rebalance."""
    consumer._coordinator.request_rejoin()
