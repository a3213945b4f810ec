"""One member of a Kafka consumer group, shared by all outlets of that group in this process.

Records go to outlets with room; a partition keeps to one outlet while that has room, so that the order per key
holds as far as a group with several consumers can hold it. What is settled is committed as a contiguous prefix
per partition. A record belongs to one outlet at a time, and what an outlet says about a record that is no longer
its own (taken back at `leave`, or the partition went to another member) is ignored.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import IllegalStateError, KafkaError

from flowcontrol.backoff import Backoff
from gateway.kafka.consumers import (
    CHUNK,
    FETCH_WAIT_MS,
    ISOLATION,
    ConsumerOptions,
    close_consumer,
    is_broken,
    received,
)
from gateway.kafka.contracts import Outlet
from gateway.kafka.group_parts import Delivery, GroupStatistics, Member, Part
from gateway.kafka.replay import Spawn
from mapping.record import Received

log = logging.getLogger(__name__)

ASSIGNORS: Final = (RangePartitionAssignor,)
"""The one strategy that the default settings of the Java client and of librdkafka know too; members of one group
must have one in common. (aiokafka 0.14 joins twice when it is given two.)"""

NO_POLL_LIMIT_MS: Final = 2**31 - 1
"""A group must not lose us because clients are slow; our being alive is what the heartbeats say."""

STALL_S: Final = 0.5
"""Without demand for so long, partitions are paused. Shorter stalls keep what was fetched at hand, since pausing
throws it away; either way at most one fetch per partition is held."""

COMMIT_TIMEOUT_S: Final = 3.0
RETRY_S: Final = 0.5


class GroupReader(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """See the module. `Groups` opens, shares and closes readers."""

    def __init__(
        self,
        kafka: ConsumerOptions,
        spawn: Spawn,
        backoff: Backoff,
        group: str,
        topics: Iterable[str],
        *,
        offset_reset: str,
        commit_interval_s: float,
        revoke_wait_s: float,
        session_timeout_ms: int,
    ) -> None:
        self.group = group
        self.topics = tuple(sorted(topics))
        self.members: dict[Outlet, Member] = {}
        self._options = {
            **kafka,
            "group_id": group,
            "enable_auto_commit": False,
            "auto_offset_reset": offset_reset,
            "isolation_level": ISOLATION,
            "partition_assignment_strategy": ASSIGNORS,
            "fetch_max_wait_ms": FETCH_WAIT_MS,
            "max_partition_fetch_bytes": 256 * 1024,
            "fetch_max_bytes": 4 * 1024 * 1024,
            "session_timeout_ms": session_timeout_ms,
            "heartbeat_interval_ms": session_timeout_ms // 3,
            "rebalance_timeout_ms": max(30_000, session_timeout_ms),
            "max_poll_interval_ms": NO_POLL_LIMIT_MS,
        }
        self._spawn = spawn
        self._backoff = backoff
        self._commit_interval_s = commit_interval_s
        self._revoke_wait_s = revoke_wait_s
        self._consumer: AIOKafkaConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._parts: dict[TopicPartition, Part] = {}
        self._ready: deque[Delivery] = deque()
        self._free: dict[Member, None] = {}  # members not full, in the order of their turn
        self._later: list[tuple[float, int, Delivery]] = []
        self._order = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0  # uvloop's handles do not tell
        self._push_due = False
        self._revoking = False
        self._paused = False
        self._woken = asyncio.Event()
        self._settled = asyncio.Event()
        self._dirty = asyncio.Event()
        self._committing = asyncio.Lock()
        self._commits = self._redelivered = self._late = self._rebalances = 0

    # Life.

    async def open(self) -> None:
        """Join the group; returns when the assignment has arrived.

        Raises:
            KafkaError: Kafka is away, or it does not want us in the group; nothing is left open.
        """
        self._consumer = await self._connect()
        self._tasks = [self._spawn(self._run()), self._spawn(self._commit_regularly())]

    async def close(self) -> None:
        """Commit what is settled and leave the group."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._consumer is not None:
            answered = await self._commit()
            self._drop_parts()
            await close_consumer(self._consumer, 2.0 if answered else 0.2)
            self._consumer = None

    async def _connect(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(**self._options)
        consumer.subscribe(self.topics, listener=self)
        try:
            await consumer.start()
        except BaseException:
            await close_consumer(consumer)
            raise
        return consumer

    # What outlets say.

    def add(self, outlet: Outlet) -> Member:
        """An outlet joins; partitions are shared out anew."""
        member = self.members[outlet] = Member(outlet)
        self._free[member] = None
        self._balance()
        self.wake(member)
        return member

    def remove(self, member: Member) -> None:
        """An outlet leaves: what it has not settled is offered to the others first."""
        del self.members[member.outlet]
        self._free.pop(member, None)
        taken_back = [
            delivery
            for part in self._parts.values()
            for delivery in part.deliveries.values()
            if delivery.owner is member
        ]
        for delivery in taken_back:
            delivery.owner = None
            delivery.attempts += 1
        self._redelivered += len(taken_back)
        self._ready.extendleft(reversed(taken_back))
        for part in self._parts.values():
            if part.home is member:
                part.home = None
        self._push_soon()

    def wake(self, member: Member) -> None:
        """An outlet has room again."""
        if member.full:
            member.full = False
            self._free[member] = None
        self._push_soon()

    def done(self, member: Member, record: Received) -> None:
        """A record is settled."""
        delivery = self._owned(member, record)
        if delivery is None:
            return
        part = delivery.part
        del part.deliveries[record.offset]
        if part.checkpoint.settle(record.offset) is not None and not self._dirty.is_set():
            self._dirty.set()
        if self._revoking:
            self._settled.set()

    def again(self, member: Member, record: Received, *, failed: bool) -> None:
        """A record is given back: offer it again after its back-off."""
        delivery = self._owned(member, record)
        if delivery is None:
            return
        delivery.owner = None
        delay = self._backoff.delay(delivery.attempts)
        if failed:
            delivery.attempts += 1
        loop = asyncio.get_running_loop()
        heapq.heappush(self._later, (loop.time() + delay, next(self._order), delivery))
        self._set_timer(loop)
        if self._revoking:
            self._settled.set()

    def attempts(self, member: Member, record: Received) -> int:
        """How often the record was given to an outlet before and came back unsettled."""
        delivery = self._find(record)
        return delivery.attempts if delivery is not None and delivery.owner is member else 0

    def _find(self, record: Received) -> Delivery | None:
        part = self._parts.get(TopicPartition(record.topic, record.partition))
        delivery = part.deliveries.get(record.offset) if part is not None else None
        return delivery if delivery is not None and delivery.record is record else None

    def _owned(self, member: Member, record: Received) -> Delivery | None:
        delivery = self._find(record)
        if delivery is None or delivery.owner is not member:
            self._late += 1
            return None
        return delivery

    # Handing out.

    def _push_soon(self) -> None:
        if not self._push_due:
            self._push_due = True
            asyncio.get_running_loop().call_soon(self._push_now)

    def _push_now(self) -> None:
        self._push_due = False
        self._push()
        if self._paused and not self._ready and self._demand() > 0:
            self._resume()
        self._woken.set()

    def _push(self) -> None:
        """Give ready records to outlets that have room."""
        ready = self._ready
        while ready and not self._revoking:
            delivery = ready[0]
            part = delivery.part
            if not part.ours:
                ready.popleft()
                continue
            member = part.home
            if member is None or member.full:
                member = next(iter(self._free), None)
                if member is None:
                    return
                del self._free[member]  # to the end: partitions without a home go round
                self._free[member] = None
                part.home = member
            ready.popleft()
            delivery.owner = member  # before the offer: the outlet may settle from within
            if not member.outlet.offer_nowait(delivery.record):
                delivery.owner = None
                ready.appendleft(delivery)
                member.full = True
                self._free.pop(member, None)

    def _balance(self) -> None:
        """Take partitions from members that have more than their share; they find a new home as records come."""
        if not self.members:
            return
        share = -(-len(self._parts) // len(self.members))
        count: dict[Member, int] = {}
        for part in self._parts.values():
            if part.home is not None:
                count[part.home] = count.get(part.home, 0) + 1
                if count[part.home] > share:
                    part.home = None

    def _demand(self) -> int:
        return sum(member.outlet.demand for member in self._free)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._later[0][0]
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = loop.call_at(due, self._attempt_again)

    def _attempt_again(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._later and self._later[0][0] <= loop.time():
            delivery = heapq.heappop(self._later)[2]
            if delivery.part.ours:
                self._ready.append(delivery)
                self._redelivered += 1
        if self._later:
            self._set_timer(loop)
        self._push()

    # Reading.

    async def _run(self) -> None:
        while True:
            consumer = self._consumer
            try:
                if consumer is None:
                    consumer = self._consumer = await self._connect()
                while True:
                    await self._read(consumer)
            except KafkaError as error:
                log.warning("group %s: %r", self.group, error)
                await asyncio.sleep(RETRY_S)
                if consumer is not None and is_broken(consumer):
                    self._consumer = None
                    self._drop_parts()
                    await close_consumer(consumer)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        self._push()
        demand = self._demand()
        if self._ready or demand <= 0:
            await self._wait_demand(consumer)
            return
        self._take(await consumer.getmany(timeout_ms=1000, max_records=min(demand, CHUNK)))
        self._push()
        await asyncio.sleep(0)

    def _take(self, batches: dict[TopicPartition, list[Any]]) -> None:
        if self._revoking:
            return  # not tracked, so not committed: whoever has the partition next reads it
        for partition, records in batches.items():
            part = self._parts.get(partition)
            if part is None:
                continue
            track, deliveries = part.checkpoint.track, part.deliveries
            for source in records:
                offset = source.offset
                track(offset)
                delivery = deliveries[offset] = Delivery(received(source), part)
                self._ready.append(delivery)
            part.fetched = records[-1].offset + 1

    async def _wait_demand(self, consumer: AIOKafkaConsumer) -> None:
        self._woken.clear()
        try:
            async with asyncio.timeout(STALL_S):
                await self._woken.wait()
        except TimeoutError:
            self._paused = True
        while self._paused:
            # Polling goes on, so that errors of the group are seen; a new assignment begins unpaused.
            if assigned := consumer.assignment():
                consumer.pause(*assigned)
            self._take(await consumer.getmany(timeout_ms=1000, max_records=CHUNK))
            self._push()

    def _resume(self) -> None:
        self._paused = False
        if self._consumer is not None and (paused := self._consumer.paused()):
            self._consumer.resume(*paused)

    # Committing and rebalancing.

    async def _commit_regularly(self) -> None:
        while True:
            await self._dirty.wait()
            await self._commit()
            await asyncio.sleep(self._commit_interval_s)

    async def _commit(self) -> bool:
        """Commit the settled prefixes that grew. A failure (False) is no loss: tried again, or redelivered."""
        async with self._committing:
            self._dirty.clear()
            consumer = self._consumer
            if consumer is None:
                return False
            assigned = consumer.assignment()
            offsets = {
                partition: committable
                for partition, part in self._parts.items()
                if (committable := part.checkpoint.committable) is not None
                and committable != part.committed
                and partition in assigned
            }
            if not offsets:
                return True
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await consumer.commit(offsets)
            except (KafkaError, IllegalStateError, TimeoutError) as error:
                log.info("group %s: commit failed: %r", self.group, error)
                self._dirty.set()
                return False
            self._commits += 1
            for partition, committed in offsets.items():
                part = self._parts.get(partition)
                if part is not None:
                    part.committed = committed
            return True

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Kafka takes all partitions away: wait shortly for what outlets hold, commit, forget."""
        if not self._parts:
            return
        self._revoking = True
        try:
            async with asyncio.timeout(self._revoke_wait_s):
                while self._held():
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.info("group %s: revoked with %d records unsettled", self.group, self._held())
        await self._commit()
        self._drop_parts()

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """These are ours now, perhaps none."""
        self._drop_parts()
        self._parts = {partition: Part(partition) for partition in assigned}
        self._revoking = False
        self._rebalances += 1
        self._woken.set()

    def _held(self) -> int:
        return sum(delivery.owner is not None for part in self._parts.values() for delivery in part.deliveries.values())

    def _drop_parts(self) -> None:
        for part in self._parts.values():
            part.ours = False
        self._parts = {}
        self._ready.clear()
        self._later.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def statistics(self) -> GroupStatistics:
        """See `GroupStatistics`."""
        positions: dict[str, dict[int, int]] = {}
        committed: dict[str, dict[int, int]] = {}
        lag: dict[str, int] = {}
        consumer = self._consumer
        assigned = consumer.assignment() if consumer is not None else ()
        for (topic, number), part in self._parts.items():
            if part.fetched is not None:
                positions.setdefault(topic, {})[number] = part.fetched
            if part.committed is not None:
                committed.setdefault(topic, {})[number] = part.committed
            end = consumer.highwater(part.partition) if consumer and part.partition in assigned else None
            if end is not None and part.fetched is not None:
                lag[topic] = lag.get(topic, 0) + max(0, end - part.fetched)
        return GroupStatistics(
            group=self.group,
            topics=self.topics,
            outlets=len(self.members),
            positions=positions,
            committed=committed,
            lag=lag,
            unsettled=sum(part.checkpoint.outstanding for part in self._parts.values()),
            waiting=len(self._later),
            commits=self._commits,
            redelivered=self._redelivered,
            late=self._late,
            rebalances=self._rebalances,
        )
