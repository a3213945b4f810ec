"""The pools of one group: which members share which records, and which member is next in turn.

A pool is all members that want the same records: all records of a topic (AMQP links), or those that match one
subscription filter (the MQTT clients of one shared subscription). A record goes to one member of every subscription
filter that it matches. Members of the topic's own pool take turns with the members of the first of these filters, and
get the records that match no filter for themselves (docs/adr/0032-consumer-groups.md).

A subscription filter that has lost its last member is kept for a while: clients whose connection broke come back.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.kafka.groups.delivery.assignment import (
    AssignedPartition,
    Delivery,
    Member,
    Pool,
    Selector,
    SubscriptionFilter,
)
from mapping.record import Received

_TAKES_RUNS: Final = operator.attrgetter("takes_runs")


@dataclass(slots=True, eq=False)
class Pools:
    """The pools of a group's members in this process."""

    _return_wait_s: float
    _ended: Callable[[Pool], None]  # called for a pool that has been without members for that many seconds
    topics: frozenset[str] = frozenset()  # that have interested members
    # pools of subscription filters that have lost their last member, with their expiry timers
    empty: dict[Pool, asyncio.TimerHandle] = field(default_factory=dict)
    _wanted: Counter[str] = field(default_factory=Counter)  # by topic: pools with members that want its records
    _selector: Selector | None = None
    _whole: dict[str, Pool] = field(default_factory=dict)  # by topic: the members that want all of it
    _filtered: dict[Hashable, Pool] = field(default_factory=dict)  # by the name of the subscription filter
    _turns: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    # Members.

    def add(
        self,
        member: Member,
        topics: Collection[str],  # that may have records for it
        subscription_filter: SubscriptionFilter | None,  # matches its records; None matches all
        partitions: Collection[AssignedPartition],  # assigned here; a topic's own pool rebalances its share of them
    ) -> None:
        """Put a member into its pools."""
        if subscription_filter is None:
            for topic in topics:
                pool = self._whole.get(topic)
                if pool is None:
                    pool = self._whole[topic] = Pool(topic, frozenset((topic,)), sticky=True)
                pool.join(member)
        else:
            self._selector = subscription_filter.selector
            name = subscription_filter.name
            pool = self._filtered.get(name)
            if pool is None:
                pool = self._filtered[name] = Pool(name, frozenset(), sticky=False)
            elif pool in self.empty:
                self.empty.pop(pool).cancel()
            pool.topics = frozenset(topics)
            pool.join(member)
        for pool in member.pools:
            pool.balance(partitions)
            self._count_topics(pool)

    def remove(self, member: Member) -> None:
        """Take a member out of its pools."""
        for pool in member.pools:
            pool.leave(member)
            if not pool.members:
                if pool.sticky:
                    del self._whole[str(pool.name)]
                elif self._return_wait_s:
                    loop = asyncio.get_running_loop()
                    self.empty[pool] = loop.call_later(self._return_wait_s, self._ended, pool)
                else:
                    self._forget(pool)
            self._count_topics(pool)

    def change_topics(self, name: Hashable, topics: Collection[str]) -> None:
        """Change the topics of a subscription filter; does nothing when the filter has no members."""
        pool = self._filtered.get(name)
        if pool is not None:
            pool.topics = frozenset(topics)
            self._count_topics(pool)

    def end(self, pool: Pool) -> None:
        """Drop a pool that is in `empty`."""
        self.empty.pop(pool).cancel()
        self._forget(pool)

    def _forget(self, pool: Pool) -> None:
        del self._filtered[pool.name]
        if self._selector is not None:
            self._selector.forget(pool.name)

    def _count_topics(self, pool: Pool) -> None:
        """Update `topics` after a change of one pool's members or topics: there may be thousands of pools."""
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

    # Which pools get a record.

    def knows(self, name: Hashable) -> bool:
        """Whether a subscription filter has members, or kept records."""
        return name in self._filtered

    def keeps_records(self, pool: Pool) -> bool:
        """Whether records are kept for a pool: it has members, or its members may come back."""
        return bool(pool.members) or pool in self.empty

    def whole(self, topic: str) -> Pool | None:
        """Return the pool of members that want all of a topic."""
        return self._whole.get(topic)

    def sole(self, topic: str) -> Pool | None:
        """Return the pool that gets every record of a topic; None if filters decide, or no member wants the topic."""
        return None if self._filtered else self._whole.get(topic)

    def select(self, record: Received) -> Sequence[Pool]:
        """Return the pools that each get a copy of a record."""
        filtered = self._filtered
        if filtered and self._selector is not None:
            pools = [pool for name in self._selector.select(record) if (pool := filtered.get(name)) is not None]
            if pools:
                return pools
        whole = self._whole.get(record.topic)
        return () if whole is None else (whole,)

    # Which member of a pool gets a record.

    def demand(self, most: int, partitions: int) -> int:
        """How many more records the members would accept, at most `most`; `partitions` is the group's number here.

        Members without demand are marked full: there may be thousands, and each is asked only once.
        """
        total = 0
        for pool in (*self._whole.values(), *self._filtered.values()):
            without: list[Member] = []
            for member in pool.free:
                wanted = member.demand(partitions) if member.pools[0] is pool else None  # a member counts once
                if wanted is None:
                    continue
                if wanted <= 0:
                    without.append(member)
                    continue
                total += wanted
                if total >= most:
                    break
            for member in without:
                member.fill()
            if total >= most:
                return most
        return total

    def choose(self, pool: Pool, delivery: Delivery) -> Member | None:
        """Return the member with capacity that was served longest ago; in a sticky pool the partition will prefer it.

        While all have capacity and select everything, no member of a pool gets two records before another gets one.
        """
        member, helpers = pool.next(delivery), self._helpers(pool, delivery)
        helper = None if helpers is None else helpers.next(delivery)
        if helper is not None and (member is None or helper.served < member.served):
            member = helper
        if member is not None:
            self._serve(member)
            if pool.has_preferred(delivery):
                delivery.assigned.preferred = member
        return member

    def _serve(self, member: Member) -> None:
        """Count a member as served: its turn comes after all others'."""
        member.served = next(self._turns)
        for pool in member.pools:
            del pool.free[member]
            pool.free[member] = None

    def deal(self, pool: Pool, most: int) -> tuple[list[Member], int]:
        """Return the members next in turn, and how many records (at most `most`) they get together.

        All of them accept any records in runs, as the very next member must, and count as served; the first ones count
        once more where the number cannot be divided equally.
        """
        takers = list(itertools.takewhile(_TAKES_RUNS, itertools.islice(pool.free, most)))
        if most > len(takers):
            rounds = 1  # a member that accepts no runs is next
            if len(takers) == len(pool.free):
                rounds = max(1, min([taker.subscriber.demand for taker in takers]))
            most = min(most, rounds * len(takers))
        turn = most % len(takers)
        for taker in (*takers[turn:], *takers[:turn]):
            self._serve(taker)
        return takers, most

    def has_capacity(self, pool: Pool, delivery: Delivery) -> bool:
        """Whether a member has capacity, even if it has declined this record."""
        if pool.free:
            return True
        others = self._helpers(pool, delivery)
        return others is not None and bool(others.free)

    def may_be_wanted(self, pool: Pool, delivery: Delivery, but: Member | None = None) -> bool:
        """Whether a member other than `but` may accept a record, with capacity now or later."""
        if pool in self.empty:
            return True
        others = self._helpers(pool, delivery)
        candidates = pool.members if others is None else (*pool.members, *others.members)
        return any(member is not but and member.selects(delivery) for member in candidates)

    def _helpers(self, pool: Pool, delivery: Delivery) -> Pool | None:
        """Return the members that want all of the topic: they share records that match only one subscription filter."""
        if pool.sticky or delivery.record.offset in delivery.assigned.copies:
            return None
        return self._whole.get(delivery.record.topic)
