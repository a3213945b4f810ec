"""Consumer groups: subscribers of one group share a member of that group, and native Kafka clients may be members too.

membership = await groups.join("billing", ["orders"], subscriber)
membership.done(record)     # settled: committed with everything before it
membership.requeue(record)  # not settled: offered again, to any subscriber of the group
await membership.leave()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import MappingProxyType
from typing import Final, Literal
from weakref import WeakValueDictionary

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from flowcontrol.admission import Admission, Refusal
from flowcontrol.backoff import backoff_s
from flowcontrol.bucket import Bucket
from gateway.kafka.cluster.cluster_admin import ClusterAdmin
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused, Subscriber
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.groups.commits import EARLY_RATE
from gateway.kafka.groups.delivery.assignment import AssignedPartition, Condition, Member, SubscriptionFilter
from gateway.kafka.groups.reader import GroupReader
from gateway.kafka.groups.refusals import not_joined
from gateway.kafka.groups.statistics import GroupsStatistics, GroupStatistics
from gateway.kafka.groups.times import GroupTimes
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import Received

OffsetReset = Literal["earliest", "latest"]

GROUP_LIMIT: Final = 249
"""The longest name of a group, in characters. Kafka allows far more, but the name becomes part of keys and metrics."""


class Membership:
    """A subscriber's membership of a group. It settles each accepted record with `done`, `requeue` or `decline`.

    A record is identified by the object that was offered, not by an equal one.
    """

    def __init__(self, groups: Groups, reader: GroupReader, member: Member) -> None:
        self._groups = groups
        self._reader = reader
        self._dispatch = reader.dispatch
        self._member = member
        self._left = False

    def wake(self) -> None:
        """Report that the subscriber's demand grew; required after it had no capacity."""
        if not self._left:
            self._dispatch.wake(self._member)

    def done(self, record: Received) -> None:
        """Settle the record for good. A late call, for a record that is no longer the subscriber's, is only counted."""
        self._dispatch.done(self._member, record)

    def done_all(self, records: Sequence[Received]) -> None:
        """Settle several records, in this order, as `done` does."""
        self._dispatch.done_all(self._member, records)

    def requeue(self, record: Received, *, failed: bool = True, at_once: bool = False) -> None:
        """Give the record back: it is offered again, to any subscriber of the group, after a back-off.

        Not `failed`: it was not attempted, as with AMQP's `released`. `at_once`: without a back-off, so that it keeps
        its place; but a subscriber that gives the same record back again and again gets no records for a while.
        """
        self._dispatch.requeue(self._member, record, failed=failed, at_once=at_once)

    def decline(self, record: Received, *, failed: bool = False, keep: bool = False) -> None:
        """Offer the record to other subscribers, as it is not for this one; when no candidate is left, it is settled.

        `failed`: count this as a failed attempt. `keep`: when no candidate is left, leave it in the log for subscribers
        that join later, in a subscription as well as in a queue.
        """
        self._dispatch.decline(self._member, record, failed=failed, keep=keep)

    def has_other(self, record: Received) -> bool:
        """Whether another subscriber here may be offered the record."""
        return self._dispatch.has_other(self._member, record)

    def attempts(self, record: Received) -> int:
        """How often the record was delivered and came back; 0 for a first delivery (AMQP delivery-count)."""
        delivery = self._member.delivery(record)
        return 0 if delivery is None else delivery.attempts

    def failures(self, record: Received) -> int:
        """How many attempts have failed, as reported by a client or by the loss of its connection."""
        delivery = self._member.delivery(record)
        return 0 if delivery is None else delivery.failures

    def locate(self, record: Received) -> tuple[GroupReader, AssignedPartition] | None:
        """Return the reader and partition that settle a record; None when the subscriber no longer holds it.

        Used by a transaction that settles the record: `Commits.committing`, then `done`.
        """
        delivery = self._member.delivery(record)
        return None if delivery is None else (self._reader, delivery.assigned)

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """Return the current end of each of a topic's partitions with a leader; Refused if Kafka does not answer."""
        return await self._groups.ends(topic)

    def unread(self, ends: Mapping[TopicPartition, int]) -> int:
        """How many offsets below `ends` are still to be read for this subscriber, in partitions assigned here."""
        return self._reader.unread(self._member, ends)

    async def leave(self, *, failed: bool = True) -> None:
        """Give back all unsettled records immediately; with a group's last subscriber here, Kafka's group is left too.

        Not `failed`: the client has closed in order, and unsettled records count as attempts only.
        """
        if not self._left:
            self._left = True
            await self._groups.leave(self._reader, self._member, failed=failed)


class Groups:
    """All consumer groups of this process; one reader for each."""

    def __init__(
        self,
        kafka: ConsumerOptions,
        spawn: Spawn,
        lookup: Lookup,  # refuses topics that are unknown or hidden from clients; stopped by its owner
        readings: CatchUpReader,  # for records of queues that no receiver had selected; stopped by its owner
        *,
        random: Callable[[], float],  # for the jitter of redelivery
        times: GroupTimes = GroupTimes(),  # noqa: B008 - immutable
        # bounds a join; `SilenceLimit.bound` ends it sooner when Kafka is silent
        patience: Callable[[float], AbstractAsyncContextManager[object]] = asyncio.timeout,
        # how many groups may have members here, in all and opened by one client: each has a Kafka consumer
        places: Admission | None = None,
    ) -> None:
        """Connect to Kafka with the first `join`."""
        self._places = places
        self._lookup = lookup
        self._join_timeout_s = times.join_timeout_s
        self._patience = patience
        self._new_reader = partial(
            GroupReader,
            dict(kafka),
            spawn,
            partial(backoff_s, base=0.1, cap=30.0, random=random),
            lookup,
            readings=readings,
            times=times,
            early=Bucket(EARLY_RATE, EARLY_RATE, time.monotonic()),
        )
        self._spawn = spawn
        self._readers: dict[str, GroupReader] = {}
        # A lock lives while it is held or awaited.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.admin = ClusterAdmin(kafka, spawn)  # for all of the process

    async def join(
        self,
        group: str,  # Kafka's `group.id`
        topics: Collection[str],  # at least one; with a filter it may be none until `change_topics` names some
        subscriber: Subscriber,  # offered records according to its demand; hashable by identity, at most once per group
        *,
        # where the group starts in topics in which it has committed nothing; `latest`: at the current end. The start is
        # committed immediately
        offset_reset: OffsetReset = "earliest",
        # where it starts instead in these partitions, if it has committed nothing in their topics
        starts: Mapping[TopicPartition, int] = MappingProxyType({}),
        # matches records, and shares them with the subscribers that have the same filter; None: all, shared by all
        subscription_filter: SubscriptionFilter | None = None,
        wants: Condition | None = None,  # the subscriber's own selector; None selects all
        # which records stay in the log, unsettled, when no subscriber here selects them: for others, and for later
        # subscribers. None: no records
        queue: Condition | None = None,
        client: str = "",  # that a group without members here is counted for (`identity.share_of`)
    ) -> Membership:
        """Join a group; returns when Kafka has assigned this process its partitions, which may be none.

        The subscriber may be offered records before this returns: it must report no capacity until it can accept them.

        Raises:
            Refused: an unknown topic, no permission, no legal group, too many groups, or Kafka does not answer.
        """
        if not group:
            raise Refused(Outcome.UNFIT, "the name of a group cannot be empty")
        if len(group) > GROUP_LIMIT:
            raise Refused(Outcome.UNFIT, f"the name of a group has at most {GROUP_LIMIT} characters")
        if not topics and subscription_filter is None:
            raise Refused(Outcome.UNFIT, "a group needs a topic")
        reader = self._readers.get(group)
        if subscription_filter is None:  # a filter's topics were not named by a client: missing ones are left out
            for topic in set(topics) if reader is None else set(topics) - reader.topics:
                await self._lookup.partitions(topic)
        async with self._lock(group):
            if self._stopped:
                raise Refused(Outcome.BUSY, "the gateway is stopping")
            reader = self._readers.get(group)
            if reader is None:
                self._take_place(client)
                reader = self._readers[group] = self._new_reader(group)
                reader.opened_by = client
                reader.start()
            # Add the member before subscribing, so that its first records find an interested member.
            member = reader.add(
                subscriber,
                topics,
                subscription_filter,
                wants,
                latest=offset_reset == "latest",
                starts=starts,
                queue=queue,
            )
        try:
            await self._subscribe(reader)
        except BaseException:
            self._remove(reader, member, failed=True)  # without waiting for Kafka's answer
            raise
        return Membership(self, reader, member)

    def change_topics(self, group: str, subscription_filter: SubscriptionFilter, topics: Collection[str]) -> None:
        """Change the topics that may have records for a subscription filter.

        New topics are read from their beginning: all their records are newer than the filter.
        """
        reader = self._readers.get(group)
        if reader is not None:
            reader.change_topics(subscription_filter.name, topics)

    def knows(self, group: str, subscription_filter: SubscriptionFilter) -> bool:
        """Whether the filter has subscribers or kept records, so that its selector's `forget` will be called."""
        reader = self._readers.get(group)
        return reader is not None and reader.dispatch.knows(subscription_filter.name)

    async def leave(self, reader: GroupReader, member: Member, *, failed: bool = True) -> None:
        """Remove a member from its group (`Membership.leave`)."""
        closing = self._remove(reader, member, failed=failed)
        if closing is not None:
            # The caller may be cancelled; the consumer would then stay a member of the group, and read nothing.
            await asyncio.shield(closing)

    def _remove(self, reader: GroupReader, member: Member, *, failed: bool) -> asyncio.Task[None] | None:
        """Remove a member; return the task that closes its reader, if the member was the last one."""
        reader.remove(member, failed=failed)
        if reader.members or self._readers.get(reader.group) is not reader:
            return None
        closing = self._spawn(self._close(reader))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _close(self, reader: GroupReader) -> None:
        async with self._lock(reader.group):
            if not reader.members and self._readers.get(reader.group) is reader:
                del self._readers[reader.group]
                if self._places is not None:
                    self._places.leave(reader.opened_by)
                await reader.close()

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """Return the ends of the topic's partitions that have a leader; Refused if Kafka does not answer."""
        topics = await self._lookup.existing((topic,))
        return await self._lookup.ends(topics.get(topic, ()), led=True)

    def _take_place(self, client: str) -> None:
        refusal = None if self._places is None else self._places.enter(client)
        if refusal is not None:
            whose = "the gateway" if refusal is Refusal.FULL else "the client"
            raise Refused(Outcome.FULL, f"{whose} has too many consumer groups with members")

    async def positions(self, group: str, topic: str) -> dict[int, OffsetAndMetadata]:
        """Return a group's committed offsets in a topic, by partition, after committing for its members here.

        Raises:
            Refused: no permission, or Kafka does not answer.
        """
        reader = self._readers.get(group)
        if reader is not None:
            await reader.commits.commit()
        committed = await self.admin.committed(group)
        return {tp.partition: offset for tp, offset in committed.items() if tp.topic == topic}

    async def delete(self, group: str, topic: str) -> bool:
        """End a subscription: delete a group that has committed offsets only in `topic`.

        Returns:
            False when the group is kept: it has members, here or elsewhere, or reads other topics too.

        Raises:
            Refused: no permission, or Kafka does not answer.
        """
        async with self._lock(group):
            return group not in self._readers and await self.admin.delete_group(group, topic)

    async def stop(self) -> None:
        """Commit all settled records and leave all groups."""
        self._stopped = True
        readers = list(self._readers.values())
        self._readers.clear()
        await asyncio.gather(*(reader.close() for reader in readers), *self._closing)
        await self.admin.stop()

    def statistics(self) -> tuple[GroupStatistics, ...]:
        """Return the statistics of each reader."""
        return tuple(reader.statistics() for reader in self._readers.values())

    def by_group(self) -> GroupsStatistics:
        """Return the statistics of all readers by group, for the metrics."""
        return GroupsStatistics({reader.group: reader for reader in self.statistics()})

    def _lock(self, group: str) -> asyncio.Lock:
        lock = self._locks.get(group)
        if lock is None:
            lock = self._locks[group] = asyncio.Lock()
        return lock

    async def _subscribe(self, reader: GroupReader) -> None:
        try:
            async with self._patience(self._join_timeout_s):
                await reader.subscribe()
        except TimeoutError as error:
            raise Refused(Outcome.BUSY, f"group {reader.group!r} could not be joined in time") from error
        except KafkaError as error:
            raise not_joined(reader.group, error) from error
