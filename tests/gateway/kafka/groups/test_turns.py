"""Records go in turn to the members with capacity, however these join and leave; the demand is what they will take."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from aiokafka import TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.kafka.groups.delivery.assignment import AssignedPartition, Delivery, Member, Pool, SubscriptionFilter
from gateway.kafka.groups.delivery.pools import Pools
from mapping.record import Received

GUESTS, TOPICS, FILTERS = st.integers(0, 4), st.sampled_from("tuv"), st.sampled_from([1, 2])


class Guest(Member):
    """Selects the records that name it."""

    def __init__(self, number):
        super().__init__(object())
        self.number = number
        self.wanted = 0  # how many more records; negative: has capacity, but wants none of the coming records

    def selects(self, delivery):
        return self.number in delivery.record.key

    def demand(self, partitions):
        return None if self.wanted < 0 else self.wanted


class Everything:
    """A selector whose filters match all records."""

    def select(self, record):
        return [1, 2]

    def forget(self, name):
        pass


def delivery(pool, topic, numbers):
    record = Received(topic, bytes(numbers), None, (), 0, 0, 0)
    return Delivery(record, AssignedPartition(TopicPartition(topic, 0), 0, None), pool)


class Guests(RuleBasedStateMachine):
    """Members that join any pools and leave, fill and are woken; records for any of them. The model is a clock."""

    def __init__(self):
        super().__init__()
        self.pools = Pools(0, lambda pool: None)
        self.guests = {}  # present members, by number
        self.since = {}  # by number, for those with capacity: when they were served, joined or were woken
        self.last = {}  # by number: when they were served
        self.clock = itertools.count(1)

    @rule(number=GUESTS, topics=st.sets(TOPICS, min_size=1), name=st.none() | FILTERS)
    def come(self, number, topics, name):
        if number not in self.guests:
            guest = self.guests[number] = Guest(number)
            subscription_filter = None if name is None else SubscriptionFilter(Everything(), name)
            self.pools.add(guest, sorted(topics), subscription_filter, ())
            self.since[number] = next(self.clock)
            self.last[number] = 0

    @rule(number=GUESTS)
    def leave(self, number):
        guest = self.guests.pop(number, None)
        if guest is not None:
            self.pools.remove(guest)
            self.since.pop(number, None)

    @rule(number=GUESTS)
    def fill(self, number):
        if number in self.guests:
            self.guests[number].fill()
            self.since.pop(number, None)

    @rule(number=GUESTS)
    def wake(self, number):
        if number in self.guests:
            self.guests[number].wake()
            self.since.setdefault(number, next(self.clock))

    @rule(topic=TOPICS, at=st.integers(0, 2), numbers=st.sets(GUESTS))
    def hand_out(self, topic, at, numbers):
        whole = self.pools.whole(topic)
        choices = [whole, *self.pools.select(delivery(None, topic, ()).record)]
        pool = choices[at % len(choices)]
        if pool is None:
            return
        found = self.pools.choose(pool, delivery(pool, topic, numbers))
        firsts = []
        for each in dict.fromkeys((pool, whole)):  # its own members come first
            waiting = [number for number in self.in_turn(each) if number in numbers]
            firsts += waiting[:1]
        if not firsts:
            assert found is None
            return
        assert found.number == min(firsts, key=self.last.get)
        self.since[found.number] = self.last[found.number] = next(self.clock)

    @rule(most=st.integers(1, 20), wanted=st.lists(st.integers(-1, 9), min_size=5, max_size=5))
    def ask(self, most, wanted):
        for number, guest in self.guests.items():
            guest.wanted = wanted[number]
        free = list(self.since)
        found = self.pools.demand(most, 1)
        assert found == min(most, sum(max(0, wanted[number]) for number in free))
        for number in free:
            if self.guests[number].full:
                assert wanted[number] == 0
                del self.since[number]
        if found < most:  # all were asked
            assert all(wanted[number] for number in self.since)

    def in_turn(self, pool):
        """Return the model's order of a pool's members with capacity."""
        there = [] if pool is None else [number for number in self.since if pool in self.guests[number].pools]
        return sorted(there, key=self.since.get)

    @invariant()
    def those_with_capacity_stand_in_their_order(self):
        for pool in {pool for guest in self.guests.values() for pool in guest.pools}:
            assert [guest.number for guest in pool.free] == self.in_turn(pool)
            assert set(pool.members) == {guest for guest in self.guests.values() if pool in guest.pools}
        for number, guest in self.guests.items():
            assert guest.full == (number not in self.since)


TestGuests = Guests.TestCase
TestGuests.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@given(count=st.integers(1, 8), records=st.integers(0, 60))
def test_equal_members_get_equal_parts(count, records):
    pools = Pools(0, lambda pool: None)
    for number in range(count):
        pools.add(Guest(number), ["t"], None, ())
    pool = pools.whole("t")
    got = Counter(pools.choose(pool, delivery(pool, "t", range(count))).number for _ in range(records))
    parts = [got[number] for number in range(count)]
    assert max(parts) - min(parts) <= 1


@given(st.lists(st.none() | st.integers(0, 4), max_size=30), st.integers(5, 8))
def test_nobody_keeps_more_than_an_equal_part(keepers, count):
    pool = Pool("t", frozenset("t"), sticky=True)
    members = [Guest(number) for number in range(count)]
    for member in members:
        pool.join(member)
    assignment = [AssignedPartition(TopicPartition("t", number), 0, None) for number in range(len(keepers))]
    for assigned, keeper in zip(assignment, keepers, strict=True):
        assigned.preferred = None if keeper is None else members[keeper]
    pool.balance(assignment)
    share = math.ceil(len(keepers) / count)
    left = Counter(assigned.preferred.number for assigned in assignment if assigned.preferred is not None)
    before = Counter(keeper for keeper in keepers if keeper is not None)
    assert left == {keeper: min(count, share) for keeper, count in before.items()}
