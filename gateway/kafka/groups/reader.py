"""One member of a Kafka consumer group, shared by all subscribers of that group in this process.

It subscribes to the union of its subscribers' topics, reads while they have capacity, and commits, per partition, the
contiguous prefix of settled records. The commit's metadata has a ledger of the records settled behind that prefix, for
the partition's next owner. `dispatch` decides which subscriber gets which record.

Every position is set here, not by aiokafka: at the group's committed offset, or else where the group starts. That start
is committed immediately, so that no record stored from then on can be missed. When a rebalance returns a partition and
no other member has committed for it in between, it continues unchanged, and subscribers keep the records they hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import ConsumerStoppedError, KafkaError

from flowcontrol.bucket import Bucket
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused, Subscriber
from gateway.kafka.driver.kafka_consumer import (
    CHUNK,
    ConsumerOptions,
    close_consumer,
    committed_positions,
    follow_missing,
    group_consumer,
    is_broken,
    keep_commits,
    poll,
    rejoin,
    stop_waiting,
    subscribe,
)
from gateway.kafka.driver.lifecycle import start_consumer
from gateway.kafka.groups.commits import COMMIT_TIMEOUT_S, LEFT_GROUP, Commits, without_foreign_metadata
from gateway.kafka.groups.delivery.assignment import AssignedPartition, Condition, Member, SubscriptionFilter
from gateway.kafka.groups.delivery.dispatch import Dispatch
from gateway.kafka.groups.fetch_pace import FetchPace
from gateway.kafka.groups.recreated_topics import RecreatedTopics
from gateway.kafka.groups.start_offsets import StartOffsets
from gateway.kafka.groups.statistics import GroupStatistics, snapshot, unread
from gateway.kafka.groups.times import GroupTimes
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.delays import GROUP, delays
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn, keep_running

log = structlog.get_logger(__name__)

STALL_S: Final = 0.5
"""Partitions are paused after this time without demand, which discards what was fetched: at most one fetch of each."""

FOLLOW_S: Final = 2.0
"""The least time between two changes of the subscription that no join waits for: each change rebalances the whole
group, and new topics often come in bursts."""

SPAN: Final = 50_000
"""How many records of a partition may be tracked behind an unsettled one (about 100 bytes each), plus the blocks of
1,024 offsets with unselected ones (250 bytes each): 1,000 windows of 20, or 50 million records behind the first one."""

RETRY_S: Final = 0.5

POLL_MS: Final = 1000


class GroupReader(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """The member of one group in this process. `Groups` starts, shares and closes readers.

    `topics` is the current subscription. `dispatch` delivers the records, and subscribers settle them there.
    """

    def __init__(
        self,
        kafka: ConsumerOptions,
        spawn: Spawn,
        backoff_s: Callable[[int], float],
        lookup: Lookup,
        group: str,
        *,
        readings: CatchUpReader,
        times: GroupTimes,
        early: Bucket,  # for commits
    ) -> None:
        self.group = group
        self.opened_by = ""  # the client that it is counted for (`Groups.join`)
        self.topics: frozenset[str] = frozenset()
        self._new_consumer = partial(group_consumer, kafka, group, session_timeout_ms=times.session_timeout_ms)
        self._spawn = spawn
        self._lookup = lookup
        self._times = times
        self.dispatch = Dispatch(backoff_s, self._push_soon, readings, return_wait_s=times.return_wait_s)
        self.commits = Commits(group, self.dispatch, lookup, lambda: self._consumer, early)
        self._consumer: AIOKafkaConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._starts = StartOffsets(group, lookup)
        self._recreated = RecreatedTopics(lookup)
        self._push_due = False
        self._paused = False
        self._own_change = False
        self._closed = False
        self._stalled: set[AssignedPartition] = set()
        self._woken = asyncio.Event()
        self._stale = asyncio.Event()
        self._connected = asyncio.Event()
        self._assigned = asyncio.Event()
        self._changing = asyncio.Lock()
        self._rebalances = 0
        self._pace = FetchPace()

    # Lifetime.

    def start(self) -> None:
        """Start the tasks; the first `subscribe` that has topics joins the group."""
        self._lookup.add_listener(self._check_topic_ids)
        works = (self._run, self._follow, self._await_leaders, *self.commits.works)
        self._tasks = [self._spawn(keep_running(work, "group", self.group)) for work in works]

    async def close(self) -> None:
        """Commit all settled records and leave the group."""
        self._closed = True
        if self._tasks:
            self._lookup.remove_listener(self._check_topic_ids)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disconnect()

    async def _disconnect(self) -> None:
        consumer = self._consumer
        if consumer is not None:
            answered = await self.commits.commit(again=True)  # the time for which Kafka keeps the position begins now
            self._let_go(consumer)
            await close_consumer(consumer, 2.0 if answered else 0.2)
        self.dispatch.close()

    def _let_go(self, consumer: AIOKafkaConsumer) -> None:
        """Stop reading with a consumer that will be closed; calls of `subscribe` that wait for it return."""
        self._consumer = None
        self._connected.clear()
        self.dispatch.suspended = True
        self.topics = frozenset()
        stop_waiting(consumer)
        self._assigned.set()

    # Called for subscribers.

    @property
    def members(self) -> Collection[Subscriber]:
        """The subscribers that share this reader."""
        return self.dispatch.members.keys()

    def add(
        self,
        subscriber: Subscriber,
        topics: Collection[str],
        subscription_filter: SubscriptionFilter | None,
        wants: Condition | None,
        *,
        latest: bool,
        starts: Mapping[TopicPartition, int],
        queue: Condition | None,
    ) -> Member:
        """Add a subscriber, as in `Groups.join`; call `subscribe` next when its topics are new.

        A group without committed offsets in a topic begins at `starts`, and where these have nothing at the topic's end
        (`latest`) or its beginning.
        """
        new = set(topics) - self.topics
        self._starts.begin_at({tp: offset for tp, offset in starts.items() if tp.topic in new})
        if latest:
            self._starts.begin_at_end(new)
        return self.dispatch.add(subscriber, topics, subscription_filter, wants, queue=queue)

    def remove(self, member: Member, *, failed: bool = True) -> None:
        """Remove a subscriber; its unsettled records are offered to the others first (`Dispatch.remove`)."""
        self.dispatch.remove(member, failed=failed)
        self._starts.forget_unwanted(self.dispatch.topics)
        self._check_topics()

    def change_topics(self, name: Hashable, topics: Collection[str]) -> None:
        """Change the topics of a subscription filter; new topics are read from their beginning."""
        self.dispatch.change_topics(name, topics)
        self._check_topics()

    def _check_topics(self) -> None:
        if self.dispatch.topics != self.topics:
            self._stale.set()

    def _push_soon(self) -> None:
        if not self._push_due:
            self._push_due = True
            asyncio.get_running_loop().call_soon(self._push_now)

    def _push_now(self) -> None:
        self._push_due = False
        self.dispatch.push()
        if self._paused and not self.dispatch.suspended and self.dispatch.demand > 0:
            self._resume()
        self._woken.set()

    # The subscription.

    async def subscribe(self) -> None:
        """Subscribe to the topics that the subscribers want now; returns when Kafka has assigned this member's share.

        Concurrent calls share a rebalance.

        Raises:
            KafkaError: Kafka is unreachable, or does not admit this member to the group.
            Refused: as for KafkaError.
        """
        async with self._changing:
            topics = self.dispatch.topics
            if not topics:
                if self._consumer is not None:
                    await self._disconnect()
                return
            if topics == self.topics:
                await self._assigned.wait()  # the call that subscribed may have timed out
                return
            consumer = self._consumer
            if consumer is None:
                consumer = await self._connect()
            try:
                await self._subscribe(consumer, topics)
            except BaseException:
                if not self._connected.is_set():
                    self._consumer = None
                    self.topics = frozenset()
                    await close_consumer(consumer)
                raise
            self._connected.set()

    async def _connect(self) -> AIOKafkaConsumer:
        consumer = self._new_consumer()
        await start_consumer(consumer, self._spawn)
        keep_commits(consumer, self._times.kept_ms)
        self._pace = FetchPace()
        if self._closed:
            await close_consumer(consumer)
            raise KafkaError(LEFT_GROUP)
        follow_missing(consumer, lambda: self._spawn(self._lookup.refresh()))
        self._consumer = consumer
        return consumer

    async def _subscribe(self, consumer: AIOKafkaConsumer, topics: frozenset[str]) -> None:
        subscription = consumer.subscription
        await self._starts.find(consumer, topics - self.topics, self.dispatch.topics)
        await self.commits.commit()
        if consumer is not self._consumer:
            raise KafkaError(LEFT_GROUP)
        self._own_change = True
        self._assigned.clear()
        self.topics = topics
        self._recreated.watch(topics)
        try:
            await subscribe(consumer, topics, self)
            await self._assigned.wait()
            if consumer is not self._consumer:
                raise KafkaError(LEFT_GROUP)
        except BaseException as error:
            # Once it has subscribed, a call that is cancelled or has timed out leaves the assignment to the next call.
            if isinstance(error, KafkaError) or subscription() != topics:
                self.topics = frozenset()
                self._stale.set()
            raise
        finally:
            self._own_change = False

    async def _follow(self) -> None:
        """Keep the subscription up to date while topics appear and vanish and subscribers leave."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                async with asyncio.timeout(self._times.join_timeout_s):  # joins need the same lock
                    await self.subscribe()
            except Exception as error:
                if not isinstance(error, KafkaError | Refused | TimeoutError):
                    failures.report("group", error, self.group)
                log.warning("a group's subscription cannot be changed", group=self.group, error=repr(error))
                self._check_topics()
            await asyncio.sleep(FOLLOW_S)

    async def _await_leaders(self) -> None:
        """Start reading partitions that had no leader when the group was joined, as soon as they have one."""
        while True:
            for tp, offset in (await self._starts.await_leaders()).items():
                assigned = self.dispatch.assignment.get(tp)
                if assigned is not None and assigned.position is None:
                    self._start_reading(self._replace_partition(assigned, offset))

    # Reading.

    async def _run(self) -> None:
        while True:
            await self._connected.wait()
            consumer = self._consumer
            try:
                while consumer is not None and consumer is self._consumer:
                    await self._read(consumer)
            except (KafkaError, ConsumerStoppedError) as error:
                log.warning("a group cannot be read", group=self.group, error=repr(error))
                await asyncio.sleep(RETRY_S)
                if consumer is self._consumer and is_broken(consumer):
                    await self._replace(consumer)
            except Exception:
                # Records that the consumer returned may not have been delivered: a new one starts at our positions.
                if consumer is not None and consumer is self._consumer:
                    await self._replace(consumer)
                raise

    async def _replace(self, consumer: AIOKafkaConsumer) -> None:
        """Close a broken consumer; the next `subscribe` joins the group with a new one."""
        self._let_go(consumer)
        self.dispatch.set_assignment(())
        self._stale.set()
        await close_consumer(consumer)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        dispatch = self.dispatch
        dispatch.push()
        if self._stalled:
            self._unstall(consumer)
        demand = dispatch.demand
        if demand <= 0:
            await self._wait_demand(consumer)
            return
        records = await poll(consumer, wait_ms=POLL_MS, most=min(demand, CHUNK))
        self._pace.note(consumer, empty=not records)
        self._take(records)
        dispatch.push()
        await asyncio.sleep(0)

    def _take(self, batches: dict[TopicPartition, list[Any]]) -> None:
        dispatch = self.dispatch
        if dispatch.suspended:
            return  # our position is unchanged, and is sought again if the partition stays here
        if not batches:
            self.commits.pass_markers()
        take, assignment = dispatch.take, dispatch.assignment
        for partition, records in batches.items():
            assigned = assignment.get(partition)
            if assigned is None:
                continue
            if assigned.position is not None and records[0].offset < assigned.position:
                assigned = self._restart_partition(assigned, records[0].offset)
                assignment = dispatch.assignment
            take(records, assigned)
            delays.note(GROUP, records)
            assigned.position = records[-1].offset + 1
            if assigned.span > SPAN:
                self._stall(assigned)

    def _check_topic_ids(self, _: object) -> None:
        """Read recreated topics, found in new metadata, from their beginning, whatever was committed."""
        for topic in self._recreated.check():
            self._starts.forget_topic(topic)
            for assigned in [one for one in self.dispatch.assignment.values() if one.partition.topic == topic]:
                fresh = self._restart_partition(assigned, 0)
                self._start_reading(fresh)  # which commits 0, so that no member starts at the old offset

    def _restart_partition(self, assigned: AssignedPartition, offset: int) -> AssignedPartition:
        """Start a partition again whose topic was recreated: its id differs, or its log ends below our position."""
        log.warning(
            "a topic of a group was recreated",
            group=self.group,
            topic=assigned.partition.topic,
            partition=assigned.partition.partition,
            continues_at=offset,
        )
        self._starts.forget((assigned.partition,))
        return self._replace_partition(assigned, offset)

    def _replace_partition(self, assigned: AssignedPartition, offset: int) -> AssignedPartition:
        """Replace a partition by an unread one that starts at an offset."""
        fresh = AssignedPartition(assigned.partition, offset, None)
        self.dispatch.set_assignment([fresh if one is assigned else one for one in self.dispatch.assignment.values()])
        return fresh

    def _start_reading(self, assigned: AssignedPartition) -> None:
        """Read a fresh partition, and commit its start."""
        consumer = self._consumer
        if consumer is not None and assigned.partition in consumer.assignment():
            consumer.seek(assigned.partition, assigned.position)
            if not self._paused:
                consumer.resume(assigned.partition)
        self.dispatch.progress.set()
        self._push_soon()

    def _stall(self, assigned: AssignedPartition) -> None:
        log.warning(
            "reading is paused: too many records lie behind an unsettled one",
            group=self.group,
            topic=assigned.partition.topic,
            partition=assigned.partition.partition,
            unselected=len(assigned.unselected),
        )
        self._stalled.add(assigned)
        if self._consumer is not None:
            self._consumer.pause(assigned.partition)

    def _unstall(self, consumer: AIOKafkaConsumer) -> None:
        self._stalled = {assigned for assigned in self._stalled if assigned.ours}
        for assigned in [assigned for assigned in self._stalled if assigned.span <= SPAN // 2]:
            self._stalled.remove(assigned)
            if assigned.partition in consumer.assignment():
                consumer.resume(assigned.partition)

    async def _wait_demand(self, consumer: AIOKafkaConsumer) -> None:
        self._woken.clear()
        try:
            async with asyncio.timeout(STALL_S):
                await self._woken.wait()
        except TimeoutError:
            self._paused = self.dispatch.demand <= 0  # demand that came with the time-out will not wake us again
        while self._paused:
            # Polling goes on, so that errors of the group are noticed; a new assignment starts unpaused.
            consumer.pause(*consumer.assignment())
            self._take(await poll(consumer, wait_ms=POLL_MS))
            self.dispatch.push()

    def _resume(self) -> None:
        self._paused = False
        if self._consumer is not None:
            self._consumer.resume(*(self._consumer.paused() - self._not_read))

    @property
    def _not_read(self) -> set[TopicPartition]:
        """The partitions that stay paused."""
        return {assigned.partition for assigned in self._stalled if assigned.ours} | self._starts.leaderless.keys()

    # Rebalancing.

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Wait briefly for records that subscribers hold, and commit: the partitions may move to other members.

        There is no wait when we changed the subscription ourselves: that moves no partition of the other topics.
        """
        dispatch = self.dispatch
        dispatch.suspended = True
        if not dispatch.assignment:
            return
        if not self._own_change:
            try:
                async with asyncio.timeout(self._times.revoke_wait_s):
                    while dispatch.held:
                        dispatch.returned.clear()
                        await dispatch.returned.wait()
            except TimeoutError:
                log.info("a partition was revoked with records unsettled", group=self.group, unsettled=dispatch.held)
        await self.commits.commit()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start reading the assigned partitions; there may be none."""
        consumer = self._consumer
        partitions = set(assigned)
        if consumer is None or consumer.assignment() != partitions:
            return  # the subscription has changed in the meantime: another assignment follows
        consumer.pause(*partitions)  # until our positions are set
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S), self.commits.lock:
                is_current = await self._set_positions(consumer, partitions)
        except Exception as error:  # aiokafka is the caller, and would leave the partitions paused forever
            if isinstance(error, KafkaError | TimeoutError):
                log.warning("cannot fetch the committed offsets", group=self.group, error=repr(error))
            else:
                failures.report("group", error, self.group)
            await asyncio.sleep(RETRY_S)
            rejoin(consumer)
            return
        if is_current:
            await self.commits.commit()  # the start offsets, if the group is new
            # From now on a partition without a committed offset is a new partition.
            assignment = self.dispatch.assignment
            self._starts.forget([tp for tp, assigned in assignment.items() if assigned.committed is not None])
            self._assigned.set()
            self._push_soon()

    async def _set_positions(self, consumer: AIOKafkaConsumer, partitions: set[TopicPartition]) -> bool:
        """Set the positions of an assignment and resume its partitions; False when it is no longer the current one."""
        self._recreated.note_commits(self.dispatch.assignment.values())
        committed = {
            partition: without_foreign_metadata(stored)
            for partition, stored in (await committed_positions(consumer, partitions)).items()
        }
        self._starts.forget(committed)
        starts = await self._starts.offsets_of(partitions - committed.keys())
        if consumer.assignment() != partitions:
            return False
        dispatch = self.dispatch
        assignment = []
        for partition in partitions:
            assigned = dispatch.assignment.get(partition)
            stored, start = committed.get(partition), starts.get(partition)
            if not self._recreated.trusts(partition.topic):  # perhaps noticed only during this call
                stored, start = None, 0
            if assigned is None or assigned.position is None or assigned.committed != stored:
                assigned = AssignedPartition(partition, start if stored is None else stored.offset, stored)
            if assigned.position is not None:
                consumer.seek(partition, assigned.position)
            assignment.append(assigned)
        dispatch.set_assignment(assignment)
        self._rebalances += 1
        consumer.resume(*(partitions - self._not_read))
        dispatch.suspended = False
        return True

    def unread(self, member: Member, ends: Mapping[TopicPartition, int]) -> int:
        """Return how many records a member has not got yet, given the ends of the log."""
        return unread(self.dispatch, self._consumer, member, ends)

    def statistics(self) -> GroupStatistics:
        """Return the counts so far."""
        stalled = sum(assigned.ours for assigned in self._stalled)
        counts = {"commits": self.commits.count, "rebalances": self._rebalances, "stalled": stalled}
        return snapshot(self.group, self.topics, self.dispatch, self._consumer, **counts)
