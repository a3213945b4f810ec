"""Consumer groups: outlets of one group share a member of that group, and native Kafka clients may be members too.

membership = await groups.join("billing", ["orders"], outlet)
membership.done(record)      # settled: committed with everything before it
membership.again(record)     # not settled: offered again, to any outlet of the group
await membership.leave()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal
from weakref import WeakValueDictionary

import aiokafka.errors as kafka_errors

from flowcontrol.backoff import Backoff
from gateway.kafka.consumers import ConsumerOptions, Lookup
from gateway.kafka.contracts import Outlet, Refused
from gateway.kafka.group_parts import GroupStatistics, Member
from gateway.kafka.group_reader import GroupReader
from gateway.kafka.replay import Spawn
from mapping.outcomes import Outcome
from mapping.record import Received

OffsetReset = Literal["earliest", "latest"]
_Key = tuple[str, frozenset[str], str]

_REFUSALS: tuple[tuple[type[kafka_errors.KafkaError], Outcome], ...] = (
    (kafka_errors.GroupAuthorizationFailedError, Outcome.DENIED),
    (kafka_errors.TopicAuthorizationFailedError, Outcome.DENIED),
    (kafka_errors.UnknownTopicOrPartitionError, Outcome.UNKNOWN_TOPIC),
    (kafka_errors.InvalidGroupIdError, Outcome.UNFIT),
    (kafka_errors.InconsistentGroupProtocolError, Outcome.BROKEN),  # its members do not know "range"
)


class Membership:
    """An outlet's place in a group. Every record it was offered and took must be settled by `done` or `again`."""

    def __init__(self, groups: Groups, reader: GroupReader, member: Member) -> None:
        """Made by `Groups.join`."""
        self._groups = groups
        self._reader = reader
        self._member = member
        self._left = False

    def wake(self) -> None:
        """The outlet's demand grew; needed after it said "no room"."""
        if not self._left:
            self._reader.wake(self._member)

    def done(self, record: Received) -> None:
        """The record is settled for good. Late calls, for a record that is no longer ours, are counted only."""
        self._reader.done(self._member, record)

    def again(self, record: Received, *, failed: bool = True) -> None:
        """The record is not settled: offer it again, to any outlet of the group, after a back-off.

        Args:
            record: the very object that was offered.
            failed: count it as a failed attempt (False: it was only given back, such as AMQP's `released`).
        """
        self._reader.again(self._member, record, failed=failed)

    def attempts(self, record: Received) -> int:
        """How often the record was given out before and came back; 0 for a first delivery (AMQP delivery-count)."""
        return self._reader.attempts(self._member, record)

    async def leave(self) -> None:
        """Give back what is unsettled, at once; the last outlet of a group here leaves Kafka's group too."""
        if not self._left:
            self._left = True
            await self._groups.leave(self._reader, self._member)


class Groups:
    """All consumer groups of this process; one reader for each pair of a group and a set of topics."""

    def __init__(
        self,
        kafka: ConsumerOptions,
        spawn: Spawn,
        lookup: Lookup,
        *,
        random: Callable[[], float],
        commit_interval_s: float = 1.0,
        revoke_wait_s: float = 3.0,
        session_timeout_ms: int = 10_000,
        join_timeout_s: float = 30.0,
    ) -> None:
        """Nothing is opened before the first `join`.

        Args:
            kafka: see `ConsumerOptions`.
            spawn: starts a task of the application's task group.
            lookup: refuses topics that are unknown or not for clients; not stopped by us.
            random: for the jitter of redelivery.
            commit_interval_s: the least time between two commits of a reader.
            revoke_wait_s: how long a rebalance waits for records that outlets hold.
            session_timeout_ms: Kafka's `session.timeout.ms`.
            join_timeout_s: how long a join may take before it is Refused as BUSY.
        """
        self._kafka = dict(kafka)
        self._spawn = spawn
        self._lookup = lookup
        self._backoff = Backoff(0.1, 30.0, random=random)
        self._commit_interval_s = commit_interval_s
        self._revoke_wait_s = revoke_wait_s
        self._session_timeout_ms = session_timeout_ms
        self._join_timeout_s = join_timeout_s
        self._readers: dict[_Key, GroupReader] = {}
        # A lock lives as long as somebody holds it or waits for it.
        self._locks: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        self._stopped = False

    async def join(
        self, group: str, topics: Sequence[str], outlet: Outlet, *, offset_reset: OffsetReset = "earliest"
    ) -> Membership:
        """Join a group; returns when Kafka has assigned us our partitions, which may be none.

        Args:
            group: Kafka's `group.id`.
            topics: at least one.
            outlet: offered records as it has demand; hashable by identity, at most once in a group.
            offset_reset: where a group without committed offsets begins.

        Raises:
            Refused: an unknown topic, no permission, no legal group, or Kafka does not answer.
        """
        if not group:
            raise Refused(Outcome.UNFIT, "the name of a group cannot be empty")
        if not topics:
            raise Refused(Outcome.UNFIT, "a group needs a topic")
        if self._stopped:
            raise Refused(Outcome.BUSY, "the gateway is stopping")
        for topic in set(topics):
            await self._lookup.partitions(topic)
        key = (group, frozenset(topics), offset_reset)
        async with self._lock(key):
            reader = self._readers.get(key)
            if reader is None:
                reader = await self._open(key)
                self._readers[key] = reader
            return Membership(self, reader, reader.add(outlet))

    async def leave(self, reader: GroupReader, member: Member) -> None:
        """Called by `Membership.leave`."""
        reader.remove(member)
        key = next((key for key, value in self._readers.items() if value is reader), None)
        if key is None or reader.members:
            return
        async with self._lock(key):
            if not reader.members and self._readers.get(key) is reader:
                del self._readers[key]
                await reader.close()

    async def stop(self) -> None:
        """Commit what is settled and leave all groups."""
        self._stopped = True
        readers = list(self._readers.values())
        self._readers.clear()
        await asyncio.gather(*(reader.close() for reader in readers))

    def statistics(self) -> tuple[GroupStatistics, ...]:
        """One for each reader."""
        return tuple(reader.statistics() for reader in self._readers.values())

    def _lock(self, key: _Key) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    async def _open(self, key: _Key) -> GroupReader:
        group, topics, offset_reset = key
        reader = GroupReader(
            self._kafka,
            self._spawn,
            self._backoff,
            group,
            topics,
            offset_reset=offset_reset,
            commit_interval_s=self._commit_interval_s,
            revoke_wait_s=self._revoke_wait_s,
            session_timeout_ms=self._session_timeout_ms,
        )
        try:
            async with asyncio.timeout(self._join_timeout_s):
                await reader.open()
        except TimeoutError as error:
            raise Refused(Outcome.BUSY, f"group {group!r} could not be joined in time") from error
        except kafka_errors.KafkaError as error:
            outcome = next((outcome for kind, outcome in _REFUSALS if isinstance(error, kind)), Outcome.BUSY)
            raise Refused(outcome, f"group {group!r} cannot be joined: {error!r}") from error
        return reader
