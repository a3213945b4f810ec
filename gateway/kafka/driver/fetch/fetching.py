"""aiokafka's fetcher, made robust: partitions without a leader, answers that do not fit, waits that end at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

import aiokafka.consumer.consumer
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kafka.driver.wire import NO_LEADER
from mapping.record import Received

log = structlog.get_logger(__name__)

NUDGE_S: Final = 0.2
"""How often the fetcher is woken while `fetch` waits. When a fetch ends in the same turn of the event loop in which
something else wakes the fetcher, aiokafka still counts it as in flight, and would send no other until its own pause is
over."""

LEADERS_RETRY_S: Final = 1.0
"""Interval between metadata requests while a partition has no leader."""

LOG_INTERVAL_S: Final = 60.0
"""Interval between log lines about partitions without a leader."""


class NearerReplicas(dict[TopicPartition, tuple[int, float]]):
    """Partitions that are read from a follower instead of their leader: its node, and until when (KIP-392)."""

    moves = 0  # how often the broker to read a partition from has changed
    popped: TopicPartition | None = None  # the partition of the last `pop`, if it was read from a follower until then

    def __setitem__(self, place: TopicPartition, copy: tuple[int, float]) -> None:
        if self.get(place, (None,))[0] != copy[0]:
            self.moves += 1
        super().__setitem__(place, copy)

    def pop(self, place: TopicPartition, *default: Any) -> Any:
        """Remove a partition, and count that it has moved to another replica."""
        self.popped = place if place in self else None
        self.moves += place in self
        return super().pop(place, *default)


class PacedFetcher(Fetcher):  # type: ignore[misc]  # aiokafka carries no types
    """aiokafka's fetcher, with a pause between metadata requests while a partition has no leader."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._leaders_requested = float("-inf")
        super().__init__(*arguments, **settings)
        self._preferred_read_replica = NearerReplicas()

    def _set_error(self, place: TopicPartition, error: KafkaError) -> None:
        """Record that a partition cannot be read, unless only a follower lacks the offset: the leader is asked next."""
        if not (isinstance(error, OffsetOutOfRangeError) and self._preferred_read_replica.popped == place):
            super()._set_error(place, error)

    def _get_actions_per_node(self, assignment: Any) -> tuple[list[Any], dict[int, Any], float, bool, list[Any]]:
        """Return the next fetches, offset resets, longest wait, whether leaders are lacking, and resumed partitions."""
        fetches, resets, wait, lacking, resumed = super()._get_actions_per_node(assignment)
        if not lacking:
            return fetches, resets, wait, False, resumed
        return fetches, resets, min(wait, LEADERS_RETRY_S), self.may_request_leaders(assignment), resumed

    def may_request_leaders(self, assignment: Any) -> bool:
        """Whether it is time to request metadata for partitions without a leader; also logs that there are any."""
        now = asyncio.get_running_loop().time()
        if now < self._leaders_requested + LEADERS_RETRY_S:
            return False
        self._leaders_requested = now
        _leaderless_log.leaderless(self._client, assignment.tps, now)
        return True

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: Any) -> bool:
        """Send a fetch and keep what it brings; an answer that does not fit the request is one that did not come.

        aiokafka would end the task that fetches, and the consumer with it.
        """
        try:
            return bool(await super()._proc_fetch_request(assignment, node_id, request))
        except KafkaError:
            raise
        except Exception as error:  # names other partitions, or lacks fields
            log.warning("an answer does not fit its fetch", node=node_id, error=repr(error))
            await asyncio.sleep(self._retry_backoff)
            return False

    async def _proc_offset_request(self, node_id: int, topic_data: Any) -> Any:
        try:
            return await super()._proc_offset_request(node_id, topic_data)
        except KafkaError as error:
            # One partition's error blocks all others of its broker until metadata show that it has moved or is deleted.
            if error.invalid_metadata:
                self._client.force_metadata_update()
            raise


class _LeaderlessLog:
    """Logs once a minute for the whole process: there may be thousands of consumers."""

    def __init__(self) -> None:
        self._logged_at = float("-inf")

    def leaderless(self, client: Any, partitions: Collection[TopicPartition], now: float) -> None:
        lacking = _leaderless(client, partitions) if now >= self._logged_at + LOG_INTERVAL_S else ()
        for topic, number in sorted(lacking)[:1]:
            self._logged_at = now
            log.warning(
                "partitions have no leader; the others are being read", count=len(lacking), such_as=f"{topic}-{number}"
            )


_leaderless_log: Final = _LeaderlessLog()


def _leaderless(client: Any, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
    leader_of = client.cluster.leader_for_partition
    return {place for place in partitions if leader_of(place) == NO_LEADER}


def use_paced_fetchers() -> None:
    """Make all aiokafka consumers of this process use `PacedFetcher`, or the fetcher that their client names.

    aiokafka has no parameter for it.
    """
    aiokafka.consumer.consumer.Fetcher = _new_fetcher


def _new_fetcher(client: Any, *arguments: Any, **settings: Any) -> Fetcher:
    return getattr(client, "new_fetcher", PacedFetcher)(client, *arguments, **settings)


async def fetch(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition], *, timeout_s: float, most: int
) -> dict[TopicPartition, list[Received]]:
    """Return what `consumer.getmany` would return, but sooner; the positions move as they do there.

    The consumer was started by `lifecycle.start_consumer`, and no other code calls its `getmany`. Empty `partitions`
    mean all.

    Raises:
        ConsumerStoppedError: the consumer was stopped.
        KafkaError: as `getmany`.
    """
    fetcher = consumer._fetcher
    now = asyncio.get_running_loop().time
    until = now() + timeout_s
    while True:
        records: dict[TopicPartition, list[Received]] = await consumer.getmany(*partitions, max_records=most)
        if records or now() >= until:
            return records
        try:
            async with asyncio.timeout_at(min(until, now() + NUDGE_S)):
                await fetcher._create_fetch_waiter()  # raises when reading is not possible
        except TimeoutError:
            _wake(fetcher)


async def position(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int | None:
    """Return `consumer.position`, waking the fetcher, which looks it up, as `fetch` does.

    Returns:
        None when the position is not known yet and the partition has no leader.

    Raises:
        IllegalStateError: the partition is not assigned to this consumer.
        KafkaError: as `consumer.position`.
    """
    while True:
        lacking = without_leader(consumer, (partition,))
        try:
            async with asyncio.timeout(0 if lacking else NUDGE_S):  # a known position is returned without waiting
                offset: int = await consumer.position(partition)
                return offset
        except TimeoutError:
            if lacking:
                return None
            _wake(consumer._fetcher)


def without_leader(consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
    """Return those of the partitions that have no leader, by a started consumer's last metadata."""
    return _leaderless(consumer._client, partitions)


def _wake(fetcher: Fetcher) -> None:
    fetcher._notify(fetcher._wait_consume_future)
