"""Delivers the records of a consumer group to its subscribers in one process, and tracks the unsettled ones.

`pools.Pools` decides which members a record is for. In a topic's own pool, the keyed records of a partition go to one
member while that has capacity; other records go to the members in turn. A pool without capacity does not delay other
pools, and a record that only members without capacity may want does not delay records that others want.

Records for a subscription filter without members wait for a while, if its partitions stay assigned here for other
members. Then they are settled, like all records that no subscriber here wants.

In a queue such records are not settled: a record that no member selects stays in the log for others, and so does one
that waits too long for members without capacity. A member that joins later, or has capacity again, gets these records
from the log (`catch_up`, docs/adr/0032).

A delivery belongs to one member at a time. A call about a record that the member no longer holds is ignored, and is
counted as late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Final, cast

from aiokafka import TopicPartition

from flowcontrol.marks import Tries
from gateway.kafka.contracts import RunSubscriber, Subscriber
from gateway.kafka.groups.delivery.assignment import (
    EARLIEST,
    NO_POOL,
    AssignedPartition,
    Condition,
    Delivery,
    Member,
    Pool,
    SubscriptionFilter,
)
from gateway.kafka.groups.delivery.catch_up import CatchUp
from gateway.kafka.groups.delivery.pools import Pools
from gateway.kafka.groups.delivery.ready import ReadyDeliveries
from gateway.kafka.groups.delivery.redelivery import RedeliveryQueue, Rests
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.runtime.failures import failures
from mapping.record import Received

DEMAND: Final = 500  # the most that is requested in one call


class Dispatch:
    """The deliveries of one group. Nothing here blocks; `GroupReader` reads, commits and is the group's member."""

    def __init__(
        self,
        backoff_s: Callable[[int], float],
        changed: Callable[[], None],
        readings: CatchUpReader,
        *,
        return_wait_s: float,
    ) -> None:
        """Start without partitions, suspended; `set_assignment` adds them.

        `backoff_s` returns the delay of a record that has come back a number of times. `changed` is called when there
        may be something to deliver: call `push` soon. A subscription filter without
        members keeps its records for `return_wait_s`.
        """
        self.members: dict[Subscriber, Member] = {}  # by subscriber
        self.assignment: dict[TopicPartition, AssignedPartition] = {}  # the partitions assigned to this process
        self.suspended = True  # nothing is delivered, since partitions may be moving
        self.progress = asyncio.Event()  # set when a settled prefix has grown
        self.handed_out = asyncio.Event()  # set when members may have accepted records
        self.returned = asyncio.Event()  # set when a member has settled a record or given one back while suspended
        self.redelivered = self.late = self.unwanted = 0  # see `GroupStatistics`
        self.catch_up = CatchUp(readings, self._locate, self._offer, self._caught_up, lambda: self.suspended)
        self._changed = changed
        self._pools = Pools(return_wait_s, self._drop_pool)
        self._queues: dict[str, Condition] = {}  # by topic: which unselected records stay in the log
        self.ready = ReadyDeliveries()  # deliveries that wait for a member
        self._turn = EARLIEST + 1  # of the next record to be read
        self._parked: list[tuple[Received, AssignedPartition, Tries]] = []  # of topics without interested members
        self._redelivery = RedeliveryQueue(backoff_s, self._redeliver, changed)
        self._rests = Rests(backoff_s, self.wake)

    @property
    def topics(self) -> frozenset[str]:
        """The topics that have interested members."""
        return self._pools.topics

    def add(
        self,
        subscriber: Subscriber,  # offered records from now on
        topics: Collection[str],  # that may have records for it
        subscription_filter: SubscriptionFilter | None,  # matches its records; None matches all
        wants: Condition | None = None,  # the subscriber's own selector; None selects all
        *,
        queue: Condition | None = None,  # which records stay in the log when no member selects them; None: no records
    ) -> Member:
        """Add a subscriber."""
        member = self.members[subscriber] = Member(subscriber, wants)
        if queue is not None:
            self._queues.update(dict.fromkeys(topics, queue))
        self._pools.add(member, topics, subscription_filter, self.assignment.values())
        for assigned in self.assignment.values() if subscription_filter is None else ():
            first = assigned.unselected.first
            if first is not None and assigned.partition.topic in topics:
                self.catch_up.start(member, assigned, first)
        self._sort_parked()
        self.wake(member)
        return member

    def change_topics(self, name: Hashable, topics: Collection[str]) -> None:
        """Change the topics of a pool, and offer parked records to those that want them now."""
        self._pools.change_topics(name, topics)
        self._sort_parked()

    def knows(self, name: Hashable) -> bool:
        """Whether a subscription filter has members, or kept records."""
        return self._pools.knows(name)

    def remove(self, member: Member, *, failed: bool = True) -> None:
        """Remove a subscriber; its unsettled records are offered to the other members of their pool.

        `failed`: count the deliveries as failures, not only as attempts.
        """
        del self.members[member.subscriber]
        self.catch_up.stop(member)
        self._rests.forget(member)
        del member.subscriber  # it refers back to its member
        self._pools.remove(member)
        for assigned in self.assignment.values():
            assigned.forget(member)
        self._sort_parked()
        held = list(member.held.values())
        member.held.clear()
        self.redelivered += len(held)
        unassigned = []
        for delivery in held:
            delivery.count(failed=failed)
            if self._pools.keeps_records(delivery.pool):
                self.ready.give_back(delivery)
            else:
                unassigned.append(delivery)
        for pool in member.pools:
            if not self._pools.keeps_records(pool):
                unassigned += self.ready.take_all(pool)
        for delivery in unassigned:
            self._reroute(delivery)
        if self.suspended:
            self.returned.set()
        self._changed()

    def _drop_pool(self, pool: Pool) -> None:
        """Drop a subscription filter whose members did not return; its records go to others, or are settled."""
        self._pools.end(pool)
        for delivery in self.ready.take_all(pool):
            self._reroute(delivery)
        self._changed()

    def wake(self, member: Member) -> None:
        """Offer records again to a subscriber that has capacity; while it rests, this has no effect."""
        if not member.resting:
            member.wake()
            self.catch_up.resume(member)
            self._changed()

    def done(self, member: Member, record: Received) -> None:
        """Settle a record."""
        delivery = self._take_back(member, record)
        if delivery is not None:
            delivery.assigned.finish(record.offset)
            member.settled += 1
            self.progress.set()

    def done_all(self, member: Member, records: Sequence[Received]) -> None:
        """Settle records, in this order."""
        held = member.held
        member.settled += len(records)
        run: list[int] = []  # offsets of one partition
        assigned: AssignedPartition | None = None
        for record in records:
            delivery = held.pop(id(record), None)
            if delivery is None:
                self.late += 1
                continue
            if delivery.assigned is not assigned:
                if assigned is not None:
                    self._finish_all(assigned, run)
                assigned, run = delivery.assigned, []
            run.append(record.offset)
        if assigned is not None:
            self._finish_all(assigned, run)
            if self.suspended:
                self.returned.set()

    def requeue(self, member: Member, record: Received, *, failed: bool, at_once: bool = False) -> None:
        """Take a record back from a member, to be delivered again."""
        delivery = self._take_back(member, record)
        if delivery is None:
            return
        if failed:
            delivery.count(failed=True)
        if not at_once:
            self._redelivery.add(delivery)
            return
        self._rests.count(member, delivery)
        self._redeliver(delivery)
        self._changed()

    def decline(self, member: Member, record: Received, *, failed: bool = False, keep: bool = False) -> None:
        """Take a record back that the member does not want, to be offered to others."""
        delivery = self._take_back(member, record)
        if delivery is None:
            return
        delivery.decline(member)
        if failed:
            delivery.count(failed=True)
        delivery.kept = keep
        if self._pools.keeps_records(delivery.pool):
            self.ready.add(delivery, first=True)
        else:
            self._reroute(delivery)
        self._changed()

    def has_other(self, member: Member, record: Received) -> bool:
        """Whether another member may get a record that this one holds."""
        delivery = member.delivery(record)
        return delivery is not None and self._pools.may_be_wanted(delivery.pool, delivery, but=member)

    def _take_back(self, member: Member, record: Received) -> Delivery | None:
        delivery = member.held.pop(id(record), None)
        if delivery is None:
            self.late += 1
        elif self.suspended:
            self.returned.set()
        return delivery

    def _finish_all(self, assigned: AssignedPartition, offsets: Sequence[int]) -> None:
        if assigned.copies or assigned.in_flight or assigned.tries:
            for offset in offsets:
                assigned.finish(offset)
        else:
            assigned.checkpoint.settle_all(offsets)
        self.progress.set()

    def _leave_in_log(self, delivery: Delivery) -> None:
        """Leave a record that no member here wants in the log if it is kept or its topic is a queue; or settle it."""
        assigned, record = delivery.assigned, delivery.record
        stays = self._queues.get(record.topic)
        kept = delivery.kept or (stays is not None and stays(record))
        if kept and record.offset not in assigned.copies:
            declined = delivery.declined if delivery.kept else None
            assigned.leave(record.offset, declined)
        else:
            self.unwanted += 1
            assigned.finish(record.offset)
        self.progress.set()

    # Records.

    def take(self, records: Sequence[Received], assigned: AssignedPartition) -> None:
        """Queue records that were read from a partition for their pools."""
        if assigned.ledger is not None:
            records = assigned.unsettled(records)
        assigned.checkpoint.track(*[record.offset for record in records])
        pool = self._pools.sole(assigned.partition.topic)
        if records and (pool is None or records[0].offset < assigned.marked):
            for turn, record in enumerate(records, self._turn):
                self._route(record, assigned, turn, assigned.tries_before(record.offset))
            if pool is not None:
                self.progress.set()  # commit soon: what crashes us would be counted once only
        elif pool is not None:
            turns = enumerate(records, self._turn)
            self.ready.add_all(pool, [Delivery(record, assigned, pool, turn) for turn, record in turns])
        self._turn += len(records)

    def _route(self, record: Received, assigned: AssignedPartition, turn: int, tries: Tries) -> None:
        """Queue a record for each pool that gets a copy; one with the turn `EARLIEST` was read before others."""
        queue = self.ready.give_back if turn == EARLIEST else self.ready.add
        pools = self._pools.select(record)
        if pools:
            if len(pools) > 1:
                assigned.copies[record.offset] = len(pools)
            for pool in pools:
                queue(Delivery(record, assigned, pool, turn, *tries))
        elif record.topic in self.topics:
            self._leave_in_log(Delivery(record, assigned, NO_POOL, turn, *tries))
        else:
            self._parked.append((record, assigned, tries))  # a rebalance is about to move the partition

    def _reroute(self, delivery: Delivery) -> None:
        """Find other pools for a delivery whose pool has no members left."""
        if delivery.record.offset in delivery.assigned.copies:
            self.unwanted += 1
            delivery.assigned.finish(delivery.record.offset)  # other subscription filters have their own copies
            self.progress.set()
        else:
            tries = (delivery.attempts, delivery.failures)
            self._route(delivery.record, delivery.assigned, EARLIEST, tries)

    def _sort_parked(self) -> None:
        """Queue the records of topics without interested members again: members or their topics have changed."""
        parked, self._parked = self._parked, []
        for record, assigned, tries in parked:
            self._route(record, assigned, EARLIEST, tries)

    # Delivering.

    @property
    def demand(self) -> int:
        """How many more records the members would accept, at most `DEMAND`; 0 when too many are waiting already."""
        return self._pools.demand(DEMAND, len(self.assignment)) if self.ready.has_space else 0

    def push(self) -> None:
        """Deliver ready records to members that have capacity."""
        if self._pools.empty and not self.ready.has_space:
            for pool in [pool for pool in self._pools.empty if pool.ready or pool.returned]:
                self._drop_pool(pool)  # it would delay pools that have members
        for pool in self.ready.pools:
            self._push_pool(pool)
            self.handed_out.set()
        if not self.ready.has_space and not self.suspended:
            for pool in self.ready.pools:
                if pool.sticky and pool.free and pool.name in self._queues:
                    self._spill(pool)

    def _spill(self, pool: Pool) -> None:
        """Leave deliveries that wait for members without capacity in the log, because other members have capacity."""
        lowest: dict[AssignedPartition, int] = {}
        for delivery in self.ready.take_all(pool):
            assigned, offset = delivery.assigned, delivery.record.offset
            if delivery.kept:
                self.ready.add(delivery)
            else:
                self._leave_in_log(delivery)
                lowest[assigned] = min(offset, lowest.get(assigned, offset))
        for member in [member for member in pool.members if member.full]:
            for assigned, offset in lowest.items():
                self.catch_up.start(member, assigned, offset)

    def _locate(self, record: Received) -> tuple[AssignedPartition, Pool] | None:
        """Return the partition and the pool of a record that was read again for a member that is behind."""
        assigned = self.assignment.get(TopicPartition(record.topic, record.partition))
        pool = self._pools.whole(record.topic)
        return None if assigned is None or pool is None else (assigned, pool)

    def _caught_up(self) -> None:
        self.progress.set()
        self._changed()

    def _push_pool(self, pool: Pool) -> None:
        if pool.returned:
            self.ready.sort(pool)
        ready = pool.ready
        passed: list[Delivery] = []
        while ready and not self.suspended:
            if pool.sticky and self._push_runs(pool):
                continue
            delivery = ready[0]
            member = delivery.assigned.preferred if pool.has_preferred(delivery) else None
            if (
                member is None
                or member.full
                or ((member.wants or member.behind or delivery.declined) and not member.selects(delivery))
            ):
                member = self._pools.choose(pool, delivery)
            wanted = member is None and self._pools.may_be_wanted(pool, delivery)
            if wanted and not self._pools.has_capacity(pool, delivery):
                break
            self.ready.take(pool)
            if member is not None:
                if not self._offer(member, delivery):
                    self.ready.add(delivery, first=True)
            elif wanted:
                passed.append(delivery)  # for members without capacity; others may want the next ones
            else:
                self._leave_in_log(delivery)
        for delivery in reversed(passed):
            self.ready.add(delivery, first=True)

    def _offer(self, member: Member, delivery: Delivery) -> bool:
        """Offer a delivery to a member; False when the member has no capacity."""
        record = delivery.record
        member.held[id(record)] = delivery  # before the offer: the subscriber may settle during the call
        try:
            taken = member.subscriber.offer_nowait(record)
        except Exception as error:  # our bug, in one delivery: a failed attempt
            failures.report("delivery", error, f"{delivery.assigned.partition} offset {record.offset}")
            self.requeue(member, record, failed=True)
            return True
        if taken:
            delivery.pool.handed_out = max(delivery.pool.handed_out, delivery.turn)
        else:
            del member.held[id(record)]
            member.fill()
        return taken

    def _push_runs(self, pool: Pool) -> bool:
        """Deliver the first ready records to members that accept runs; False when none of these can have them.

        The deliveries were never offered before. All go to one member, or in equal parts to the members next in turn.
        """
        first = pool.ready[0]
        kept = first.assigned if pool.has_preferred(first) else None
        next_member = next(iter(pool.free), None) if kept is None else kept.preferred
        if next_member is None or next_member.full or not next_member.takes_runs:
            return False
        count = pool.leading_run(kept, DEMAND)
        if not count:
            return False
        if kept is None:
            takers, count = self._pools.deal(pool, count)
        else:
            takers = [next_member]
            if count > 1:
                count = min(count, max(1, next_member.subscriber.demand))
        share, more = divmod(count, len(takers))
        for index, member in enumerate(takers):
            refused = self._offer_run(member, self.ready.take_all(pool, share + (index < more)))
            for delivery in reversed(refused):
                self.ready.add(delivery, first=True)  # for the next member, so that each gets its part in order
        return True

    def _offer_run(self, member: Member, run: Sequence[Delivery]) -> Sequence[Delivery]:
        """Offer deliveries to a member; return those for which it has no capacity."""
        held = member.held
        records = [delivery.record for delivery in run]
        held.update(zip(map(id, records), run, strict=True))
        try:
            taken = cast("RunSubscriber", member.subscriber).offer_run(records, None)
        except Exception as error:  # our bug, in one of them: offer each alone to find out which
            failures.report("deliveries", error, f"{run[0].assigned.partition} offset {run[0].record.offset}")
            again = [delivery for delivery in run if held.pop(id(delivery.record), None) is not None]
            return [delivery for delivery in again if member.full or not self._offer(member, delivery)]
        if taken and run[taken - 1].turn > run[0].pool.handed_out:
            run[0].pool.handed_out = run[taken - 1].turn
        rest = run[taken:]
        if rest:
            for record in records[taken:]:
                del held[id(record)]
            member.fill()
        return rest

    def _redeliver(self, delivery: Delivery) -> None:
        """Offer a delivery again, in its place."""
        self.redelivered += 1
        if self._pools.keeps_records(delivery.pool):
            self.ready.give_back(delivery)
        else:
            self._reroute(delivery)

    # Partitions.

    def set_assignment(self, assignment: Iterable[AssignedPartition]) -> None:
        """Set the assigned partitions, and forget the deliveries of all others, also those that subscribers hold.

        A partition keeps its deliveries when the same object is in the new `assignment`.
        """
        kept = {assigned.partition: assigned for assigned in assignment}
        for partition, assigned in self.assignment.items():
            assigned.ours = kept.get(partition) is assigned
        self.assignment = kept
        for pool in self.ready.pools:
            for delivery in self.ready.take_all(pool):
                if delivery.assigned.ours:
                    self.ready.add(delivery)
        for member in self.members.values():
            lost = [key for key, delivery in member.held.items() if not delivery.assigned.ours]
            for key in lost:
                del member.held[key]
            self.catch_up.stop_revoked(member)
        self._redelivery.drop_revoked()
        self._parked = [entry for entry in self._parked if entry[1].ours]

    def close(self) -> None:
        """Forget all partitions and deliveries, and stop the timers."""
        self._redelivery.close()
        self.set_assignment(())
        for pool in tuple(self._pools.empty):
            self._drop_pool(pool)

    @property
    def held(self) -> int:
        """How many deliveries members hold."""
        return sum(len(member.held) for member in self.members.values())

    @property
    def delayed(self) -> int:
        """How many deliveries wait for their next attempt."""
        return len(self._redelivery)
