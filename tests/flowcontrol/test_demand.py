"""Records go in turn to the takers with capacity, however these join and leave; the demand is what they will take."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowcontrol.demand import Taker, TakerPool, Turns, surplus, total_demand

TAKERS, POOLS = st.integers(0, 4), st.integers(0, 2)


class Guest(Taker):
    """Selects the records that name it."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.wanted = 0  # how many more records; negative: has capacity, but wants none of the coming records

    def selects(self, record):
        return self.number in record

    def demand(self):
        return None if self.wanted < 0 else self.wanted


class Guests(RuleBasedStateMachine):
    """Takers that join any pools and leave, fill and are woken; records for any of them. The model is a clock."""

    def __init__(self):
        super().__init__()
        self.pools = [TakerPool() for _ in range(3)]
        self.turns = Turns()
        self.guests = {}  # present takers, by number
        self.since = {}  # by number, for those with capacity: when they were served, joined or were woken
        self.last = {}  # by number: when they were served
        self.clock = itertools.count(1)

    @rule(number=TAKERS, pools=st.sets(POOLS, min_size=1))
    def come(self, number, pools):
        if number not in self.guests:
            guest = self.guests[number] = Guest(number)
            for at in sorted(pools):
                self.pools[at].join(guest)
            self.since[number] = next(self.clock)
            self.last[number] = 0

    @rule(number=TAKERS)
    def leave(self, number):
        guest = self.guests.pop(number, None)
        if guest is not None:
            for pool in guest.pools:
                pool.leave(guest)
            self.since.pop(number, None)

    @rule(number=TAKERS)
    def fill(self, number):
        if number in self.guests:
            self.guests[number].fill()
            self.since.pop(number, None)

    @rule(number=TAKERS)
    def wake(self, number):
        if number in self.guests:
            self.guests[number].wake()
            self.since.setdefault(number, next(self.clock))

    @rule(at=POOLS, beside=st.none() | POOLS, record=st.sets(TAKERS))
    def hand_out(self, at, beside, record):
        others = None if beside is None or beside == at else self.pools[beside]
        found = self.turns.choose(self.pools[at], others, record)
        firsts = []
        for pool in (self.pools[at], others):
            waiting = [number for number in self.in_turn(pool) if number in record]
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
        found = total_demand(self.pools, most, Guest.demand)
        assert found == min(most, sum(max(0, wanted[number]) for number in free))
        for number in free:
            if self.guests[number].full:
                assert wanted[number] == 0
                del self.since[number]
        if found < most:  # all were asked
            assert all(wanted[number] for number in self.since)

    def in_turn(self, pool):
        """Return the model's order of a pool's takers with capacity."""
        there = [] if pool is None else [number for number in self.since if pool in self.guests[number].pools]
        return sorted(there, key=self.since.get)

    @invariant()
    def those_with_capacity_stand_in_their_order(self):
        for pool in self.pools:
            assert [guest.number for guest in pool.free] == self.in_turn(pool)
            assert set(pool.members) == {guest for guest in self.guests.values() if pool in guest.pools}
        for number, guest in self.guests.items():
            assert guest.full == (number not in self.since)


TestGuests = Guests.TestCase
TestGuests.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@given(count=st.integers(1, 8), records=st.integers(0, 60))
def test_equal_takers_get_equal_parts(count, records):
    pool, turns = TakerPool(), Turns()
    for number in range(count):
        pool.join(Guest(number))
    got = Counter(turns.choose(pool, None, range(count)).number for _ in range(records))
    parts = [got[number] for number in range(count)]
    assert max(parts) - min(parts) <= 1


@given(st.lists(st.none() | st.integers(0, 4), max_size=30), st.integers(5, 8))
def test_nobody_keeps_more_than_an_equal_part(keepers, takers):
    taken = surplus(keepers, takers)
    share = math.ceil(len(keepers) / takers)
    left = Counter(keeper for at, keeper in enumerate(keepers) if at not in taken and keeper is not None)
    before = Counter(keeper for keeper in keepers if keeper is not None)
    assert left == {keeper: min(count, share) for keeper, count in before.items()}
    assert taken == sorted(set(taken))
