"""Who gets a record of a consumer group: the subscribers of one process, their turns, and what they have not settled.

Subscribers that want the same records are a pool: all of a topic's (AMQP links), or what one subscription filter
matches (the MQTT clients of one shared subscription). A record goes to one member of every subscription filter that
matches it; members of its topic's own pool take part in the turns of the first of these, and have the records that no
subscription filter matches for themselves. In a topic's own pool a partition's records with a key keep to one member
while that has capacity; of others it is every member's turn, record by record (docs/adr/0019-shared-subscriptions.md).
A pool without capacity holds back no other, and a record that only members without capacity may want holds back none
that others want.

A subscription filter that has lost its last member keeps its records for a while, when its partitions stay here for
others: a client whose connection broke comes back. Then they are settled, as are records that nobody here wants.

Not so in a queue: what no member selects stays in the log for others, and what waits too long for members without
capacity is left there too. Who joins later, or has capacity again, is brought it (`catch_up`, docs/adr/0032).

A delivery belongs to one member at a time. What a member says about a record that is no longer its own is counted
as late, and ignored.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Final

from aiokafka import TopicPartition

from flowcontrol.backoff import Backoff
from gateway.failures import failures
from gateway.kafka.contracts import Subscriber
from gateway.kafka.groups.assignment import (
    NOBODY,
    UNTRIED,
    AssignedPartition,
    Condition,
    Delivery,
    Member,
    Pool,
    Selector,
    SubscriptionFilter,
    Tries,
)
from gateway.kafka.groups.catch_up import CatchUp, Readings
from gateway.kafka.groups.ready import ReadyDeliveries
from gateway.kafka.groups.redelivery import Later
from mapping.record import Received

DEMAND: Final = 500  # nobody asks for more at once


class Dispatch:
    """See the module. All of it is synchronous; `GroupReader` reads, commits and takes part in the group.

    Attributes:
        members: by subscriber.
        parts: the partitions that are ours.
        ready: deliveries that wait for a member.
        topics: that some member wants records of.
        suspended: whether nothing is handed out, since partitions may be moving.
        progress: set when a settled prefix has grown.
        returned: set when a member has settled a record or given one back while suspended.
        redelivered, late, unwanted: see `GroupStatistics`.
    """

    def __init__(
        self, backoff: Backoff, changed: Callable[[], None], readings: Readings, *, return_wait_s: float
    ) -> None:
        """Nothing is handed out yet: `keep` tells the partitions.

        Args:
            backoff: for records that are given back.
            changed: called when there may be something to hand out: call `push` soon.
            readings: reads the log again for members that are behind.
            return_wait_s: how long a subscription filter without members keeps its records.
        """
        self.members: dict[Subscriber, Member] = {}
        self.parts: dict[TopicPartition, AssignedPartition] = {}
        self.topics: frozenset[str] = frozenset()
        self._wanted: Counter[str] = Counter()  # by topic, how many pools with members want its records
        self.suspended = True
        self.progress = asyncio.Event()
        self.returned = asyncio.Event()
        self.redelivered = self.late = self.unwanted = 0
        self.catch_up = CatchUp(readings, self._place, self._caught_up, lambda: self.suspended)
        self._changed = changed
        self._return_wait_s = return_wait_s
        self._left: dict[Pool, asyncio.TimerHandle] = {}  # subscription filters that have lost their last member
        self._selector: Selector | None = None
        self._queues: dict[str, Condition] = {}  # by topic, which of its unselected records stay
        self._whole: dict[str, Pool] = {}  # by topic: members that want all of it
        self._chosen: dict[Hashable, Pool] = {}  # by the subscription filter's name
        self.ready = ReadyDeliveries()
        self._orphans: list[tuple[Received, AssignedPartition, Tries]] = []  # of topics that nobody wants now
        self._later = Later(backoff, self._again, changed)
        self._order = itertools.count(1)

    # Subscribers.

    def add(
        self,
        subscriber: Subscriber,
        topics: Collection[str],
        subscription_filter: SubscriptionFilter | None,
        wants: Condition | None = None,
        *,
        queue: Condition | None = None,
    ) -> Member:
        """A subscriber joins.

        Args:
            subscriber: offered records from now on.
            topics: that may hold records for it.
            subscription_filter: which of their records; None is all of them.
            wants: which of these it selects for itself; None is all.
            queue: tells what stays for others when nobody selects it; None is nothing.
        """
        member = self.members[subscriber] = Member(subscriber, wants)
        if queue is not None:
            self._queues.update(dict.fromkeys(topics, queue))
        if subscription_filter is None:
            for topic in topics:
                pool = self._whole.get(topic)
                if pool is None:
                    pool = self._whole[topic] = Pool(topic, (topic,), keeps=True)
                member.pools.append(pool)
        else:
            self._selector = subscription_filter.selector
            pool = self._chosen.get(subscription_filter.name)
            if pool is None:
                pool = self._chosen[subscription_filter.name] = Pool(subscription_filter.name, topics, keeps=False)
            elif pool in self._left:
                self._left.pop(pool).cancel()
            pool.topics = frozenset(topics)
            member.pools.append(pool)
        for pool in member.pools:
            pool.members[member] = pool.free[member] = None
            pool.balance(self.parts.values())
        for part in self.parts.values() if subscription_filter is None else ():
            first = part.unselected.first
            if first is not None and part.partition.topic in topics:
                self.catch_up.begin(member, part, first)
        for pool in member.pools:
            self._topics_changed(pool)
        self.wake(member)
        return member

    def follow(self, name: Hashable, topics: Collection[str]) -> None:
        """The topics of a subscription filter have changed; nothing happens when it has no members."""
        pool = self._chosen.get(name)
        if pool is not None:
            pool.topics = frozenset(topics)
            self._topics_changed(pool)

    def knows(self, name: Hashable) -> bool:
        """Whether a subscription filter has members, or records that are kept for it."""
        return name in self._chosen

    def remove(self, member: Member, *, failed: bool = True) -> None:
        """A subscriber leaves: what it has not settled is offered to the others of its pool first.

        Args:
            member: the subscriber's.
            failed: count that as failures, and not only as attempts.
        """
        del self.members[member.subscriber]
        self.catch_up.end(member)
        del member.subscriber  # which has a way back to its member
        for pool in member.pools:
            del pool.members[member]
            pool.free.pop(member, None)
            if not pool.members:
                self._emptied(pool)
        for part in self.parts.values():
            if part.preferred is member:
                part.preferred = None
        for pool in member.pools:
            self._topics_changed(pool)
        held = list(member.held.values())
        member.held.clear()
        self.redelivered += len(held)
        unassigned = []
        for delivery in reversed(held):
            delivery.attempts += 1
            delivery.failures += failed
            if self._lives(delivery.pool):
                self.ready.add(delivery, first=True)
            else:
                unassigned.append(delivery)
        unassigned.reverse()
        for pool in member.pools:
            while not self._lives(pool) and pool.ready:
                unassigned.append(self.ready.take(pool))
        for delivery in unassigned:
            self._replace(delivery)
        self._changed()

    def _emptied(self, pool: Pool) -> None:
        """A pool has lost its last member."""
        if pool.keeps:
            del self._whole[str(pool.name)]
        elif self._return_wait_s:
            self._left[pool] = asyncio.get_running_loop().call_later(self._return_wait_s, self._end, pool)
        else:
            self._forget(pool)

    def _forget(self, pool: Pool) -> None:
        del self._chosen[pool.name]
        if self._selector is not None:
            self._selector.forget(pool.name)

    def _end(self, pool: Pool) -> None:
        """Nobody has come back to a subscription filter."""
        self._left.pop(pool).cancel()
        self._forget(pool)
        for delivery in [self.ready.take(pool) for _ in range(len(pool.ready))]:
            self._replace(delivery)
        self._changed()

    def _lives(self, pool: Pool) -> bool:
        """Whether records are kept for it: it has members, or may have again."""
        return bool(pool.members) or pool in self._left

    def wake(self, member: Member) -> None:
        """A subscriber has capacity again."""
        if member.full:
            member.full = False
            for pool in member.pools:
                pool.free[member] = None
        self.catch_up.resume(member)
        self._changed()

    def done(self, member: Member, record: Received) -> None:
        """A record is settled."""
        delivery = self._owned(member, record)
        if delivery is not None:
            delivery.part.finish(record.offset)
            self.progress.set()

    def done_all(self, member: Member, records: Sequence[Received]) -> None:
        """Records are settled."""
        held = member.held
        run: list[int] = []  # offsets of one partition
        part: AssignedPartition | None = None
        for record in records:
            delivery = held.pop(id(record), None)
            if delivery is None:
                self.late += 1
                continue
            if delivery.part is not part:
                if part is not None:
                    self._finish_all(part, run)
                part, run = delivery.part, []
            run.append(record.offset)
        if part is not None:
            self._finish_all(part, run)
            if self.suspended:
                self.returned.set()

    def again(self, member: Member, record: Received, *, failed: bool, at_once: bool = False) -> None:
        """A record is given back: offer it again after its back-off, or before all others."""
        delivery = self._owned(member, record)
        if delivery is None:
            return
        delivery.attempts += failed
        delivery.failures += failed
        if not at_once:
            self._later.add(delivery)
            return
        self.redelivered += 1
        if self._lives(delivery.pool):
            self.ready.add(delivery, first=True)
        else:
            self._replace(delivery)
        self._changed()

    def decline(self, member: Member, record: Received, *, failed: bool = False, keep: bool = False) -> None:
        """A record is not for this member: offer it to the others; when none is left it is settled.

        Args:
            member: who had it.
            record: the record.
            failed: count it as a failed attempt.
            keep: when none is left it is not settled, but offered to all again, after a back-off.
        """
        delivery = self._owned(member, record)
        if delivery is None:
            return
        delivery.decline(member)
        delivery.attempts += failed
        delivery.failures += failed
        delivery.kept = keep
        if self._lives(delivery.pool):
            self.ready.add(delivery, first=True)
        else:
            self._replace(delivery)
        self._changed()

    def attempts(self, member: Member, record: Received) -> int:
        """How often the record was given to a subscriber before and came back unsettled."""
        delivery = member.held.get(id(record))
        return delivery.attempts if delivery is not None else 0

    def failures(self, member: Member, record: Received) -> int:
        """How many of the attempts have failed; the others ended with a subscriber that left in peace."""
        delivery = member.held.get(id(record))
        return delivery.failures if delivery is not None else 0

    def part_of(self, member: Member, record: Received) -> AssignedPartition | None:
        """The partition of a record that a member holds."""
        delivery = member.held.get(id(record))
        return delivery.part if delivery is not None else None

    def has_other(self, member: Member, record: Received) -> bool:
        """Whether another member may have a record that this one holds."""
        delivery = member.held.get(id(record))
        return delivery is not None and self._may_be_wanted(delivery.pool, delivery, but=member)

    def _owned(self, member: Member, record: Received) -> Delivery | None:
        delivery = member.held.pop(id(record), None)  # who holds a record keeps it alive: its identity is its own
        if delivery is None:
            self.late += 1
        elif self.suspended:
            self.returned.set()
        return delivery

    def _finish_all(self, part: AssignedPartition, offsets: Sequence[int]) -> None:
        if part.copies or part.flying:
            for offset in offsets:
                part.finish(offset)
        else:
            part.checkpoint.settle_all(offsets)
        self.progress.set()

    def _leave(self, delivery: Delivery) -> None:
        """Nobody here wants a record: in a queue it stays for others, elsewhere it is done with."""
        part, record = delivery.part, delivery.record
        stays = self._queues.get(record.topic)
        if stays is not None and record.offset not in part.copies and stays(record):
            part.leave(record.offset, (delivery.attempts, delivery.failures))
        else:
            self.unwanted += 1
            part.finish(record.offset)
        self.progress.set()

    # Records.

    def take(self, records: Sequence[Received], part: AssignedPartition) -> None:
        """Records of a partition were read."""
        if part.ledger is not None:
            records = part.unsettled(records)
        part.checkpoint.track(*[record.offset for record in records])
        pool = self._whole.get(part.partition.topic) if not self._chosen else None
        if pool is None:
            for record in records:
                self._sort(record, part, UNTRIED)
        elif records:
            self.ready.add_all(pool, [Delivery(record, part, pool) for record in records])

    def _sort(self, record: Received, part: AssignedPartition, tries: Tries) -> None:
        """Queue a record for everybody who is to get it."""
        pools = self._pools_of(record)
        if pools:
            if len(pools) > 1:
                part.copies[record.offset] = len(pools)
            for pool in pools:
                self.ready.add(Delivery(record, part, pool, *tries))
        elif record.topic in self.topics:
            self._leave(Delivery(record, part, NOBODY, *tries))
        else:
            self._orphans.append((record, part, tries))  # the partition is about to go to somebody who wants it

    def _pools_of(self, record: Received) -> Sequence[Pool]:
        chosen = self._chosen
        if chosen and self._selector is not None:
            found = [pool for name in self._selector.select(record) if (pool := chosen.get(name)) is not None]
            if found:
                return found
        whole = self._whole.get(record.topic)
        return () if whole is None else (whole,)

    def _replace(self, delivery: Delivery) -> None:
        """The delivery's pool has no members any more."""
        if delivery.record.offset in delivery.part.copies:
            self.unwanted += 1
            delivery.part.finish(delivery.record.offset)  # other subscription filters have their own
            self.progress.set()
        else:
            self._sort(delivery.record, delivery.part, (delivery.attempts, delivery.failures))

    def _topics_changed(self, pool: Pool) -> None:
        """A pool has got or lost members, or its topics are others: there may be thousands, so only it is looked at."""
        wanted = pool.topics if pool.members else frozenset()
        before, pool.wanted = pool.wanted, wanted
        known = len(self._wanted)
        self._wanted.update(wanted - before)
        grown = len(self._wanted) != known
        self._wanted.subtract(before - wanted)
        gone = [topic for topic in before - wanted if not self._wanted[topic]]
        for topic in gone:
            del self._wanted[topic]
        if grown or gone:
            self.topics = frozenset(self._wanted)
        orphans, self._orphans = self._orphans, []
        for record, part, tries in orphans:
            self._sort(record, part, tries)

    # Handing out.

    @property
    def demand(self) -> int:
        """How many more records members would take, at most `DEMAND`; 0 when too much waits already."""
        total = 0
        if self.ready.has_space:
            for pool in (*self._whole.values(), *self._chosen.values()):
                total += pool.demand(DEMAND - total, len(self.parts))
                if total >= DEMAND:
                    return DEMAND
        return total

    def push(self) -> None:
        """Give ready records to members that have capacity."""
        if self._left and not self.ready.has_space:
            for pool in [pool for pool in self._left if pool.ready]:
                self._end(pool)  # it would hold back those who are here
        for pool in self.ready.pools:
            self._push_pool(pool)
        if not self.ready.has_space and not self.suspended:
            for pool in self.ready.pools:
                if pool.keeps and pool.free and pool.name in self._queues:
                    self._spill(pool)

    def _spill(self, pool: Pool) -> None:
        """Leave to the log what waits for members without capacity, since others have some."""
        lowest: dict[AssignedPartition, int] = {}
        for delivery in [self.ready.take(pool) for _ in range(len(pool.ready))]:
            part, offset = delivery.part, delivery.record.offset
            if delivery.kept:
                self.ready.add(delivery)
            else:
                self._leave(delivery)
                lowest[part] = min(offset, lowest.get(part, offset))
        for member in [member for member in pool.members if member.full]:
            for part, offset in lowest.items():
                self.catch_up.begin(member, part, offset)

    def _place(self, record: Received) -> tuple[AssignedPartition, Pool] | None:
        """Where a record of the log belongs, for a member that is behind."""
        part, pool = self.parts.get(TopicPartition(record.topic, record.partition)), self._whole.get(record.topic)
        return None if part is None or pool is None else (part, pool)

    def _caught_up(self) -> None:
        self.progress.set()
        self._changed()

    def _push_pool(self, pool: Pool) -> None:
        ready = pool.ready
        passed: list[Delivery] = []
        while ready and not self.suspended:
            delivery = ready[0]
            member = delivery.part.preferred if pool.has_preferred(delivery) else None
            if (
                member is None
                or member.full
                or ((member.wants or member.behind or delivery.declined) and not member.selects(delivery))
            ):
                member = self._choose(pool, delivery)
            if member is None:
                if self._may_be_wanted(pool, delivery):
                    if not self._has_capacity(pool, delivery):
                        break
                    passed.append(self.ready.take(pool))  # for members without capacity; others may want what follows
                    continue
                self.ready.take(pool)
                if delivery.kept:
                    delivery.declined = frozenset()
                    self._later.add(delivery)
                    continue
                self._leave(delivery)
                continue
            self.ready.take(pool)
            record = delivery.record
            member.held[id(record)] = delivery  # before the offer: the subscriber may settle from within
            try:
                taken = member.subscriber.offer_nowait(record)
            except Exception as error:  # our bug, in one delivery: it counts as a failed attempt
                failures.tell("delivery", error, f"{delivery.part.partition} offset {record.offset}")
                self.again(member, record, failed=True)
                continue
            if not taken:
                del member.held[id(record)]
                self.ready.add(delivery, first=True)
                member.fill()
        for delivery in reversed(passed):
            self.ready.add(delivery, first=True)

    def _has_capacity(self, pool: Pool, delivery: Delivery) -> bool:
        """Whether a member has capacity, if not for this record, which it has declined."""
        if pool.free:
            return True
        others = self._helpers(pool, delivery)
        return others is not None and bool(others.free)

    def _choose(self, pool: Pool, delivery: Delivery) -> Member | None:
        """Whose turn it is, where the partition has no preferred member with capacity."""
        member = pool.next(delivery)
        others = self._helpers(pool, delivery)
        if others is not None:
            other = others.next(delivery)
            if other is not None and (member is None or other.served < member.served):
                member = other
        if member is not None:
            member.served = next(self._order)
            for one in member.pools:  # to the end of the turns
                del one.free[member]
                one.free[member] = None
            if pool.has_preferred(delivery):
                delivery.part.preferred = member
        return member

    def _helpers(self, pool: Pool, delivery: Delivery) -> Pool | None:
        """Members that want everything of the topic: they share what only one subscription filter matches."""
        if pool.keeps or delivery.record.offset in delivery.part.copies:
            return None
        return self._whole.get(delivery.record.topic)

    def _may_be_wanted(self, pool: Pool, delivery: Delivery, but: Member | None = None) -> bool:
        """Whether somebody wants the record, with capacity or without."""
        if pool in self._left:
            return True
        others = self._helpers(pool, delivery)
        candidates = pool.members if others is None else (*pool.members, *others.members)
        return any(member is not but and member.selects(delivery) for member in candidates)

    def _again(self, delivery: Delivery) -> None:
        """A back-off is over."""
        self.redelivered += 1
        if self._lives(delivery.pool):
            self.ready.add(delivery)
        else:
            self._replace(delivery)

    # Partitions.

    def keep(self, parts: Iterable[AssignedPartition]) -> None:
        """These are ours from now on; what others have is forgotten, and what subscribers hold of it is void.

        A part stays ours when the very object is among `parts`.
        """
        kept = {part.partition: part for part in parts}
        for partition, part in self.parts.items():
            part.ours = kept.get(partition) is part
        self.parts = kept
        for pool in self.ready.pools:
            for delivery in [self.ready.take(pool) for _ in range(len(pool.ready))]:
                if delivery.part.ours:
                    self.ready.add(delivery)
        for member in self.members.values():
            lost = [key for key, delivery in member.held.items() if not delivery.part.ours]
            for key in lost:
                del member.held[key]
            self.catch_up.keep(member)
        self._later.keep()
        self._orphans = [orphan for orphan in self._orphans if orphan[1].ours]

    def close(self) -> None:
        """Forget everything; timers end."""
        self._later.close()
        self.keep(())
        for pool in tuple(self._left):
            self._end(pool)

    @property
    def held(self) -> int:
        """How many deliveries members hold."""
        return sum(len(member.held) for member in self.members.values())

    @property
    def delayed(self) -> int:
        """How many deliveries wait for their next attempt."""
        return len(self._later)
