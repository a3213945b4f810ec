"""Budgets of receivers: counted above a threshold, bounded by what is free, and woken in time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowcontrol.budget import RESERVE, UNCOUNTED, Budget, ReceiverBudget

LIMIT = 20 * UNCOUNTED
MOST = LIMIT - LIMIT // RESERVE
COUNT = 5


class Receivers(RuleBasedStateMachine):
    """Receivers that are sent messages while their gates are open, and settle any part at any time."""

    def __init__(self):
        super().__init__()
        self.budget = Budget(LIMIT, 10**6)
        self.receivers = [ReceiverBudget(self.budget) for _ in range(COUNT)]
        self.held = [0] * COUNT
        self.told = [[] for _ in range(COUNT)]
        for receiver, told in zip(self.receivers, self.told, strict=True):
            receiver.gate.subscribe(told.append)

    @rule(number=st.integers(0, COUNT - 1), size=st.integers(1, 3 * UNCOUNTED))
    def send(self, number, size):
        receiver = self.receivers[number]
        if receiver.gate.is_open:
            self.held[number] += size
            receiver.hold(self.held[number])
            if receiver.bytes == self.held[number]:  # counted just now
                assert receiver.gate.is_open == self.budget.allows(receiver.bytes, 0)

    @rule(number=st.integers(0, COUNT - 1), part=st.floats(0, 1))
    def settle(self, number, part):
        self.held[number] -= int(self.held[number] * part)
        self.receivers[number].hold(self.held[number])

    @rule(number=st.integers(0, COUNT - 1))
    def settle_all(self, number):
        self.held[number] = 0
        self.receivers[number].hold(0)
        assert self.receivers[number].gate.is_open

    @invariant()
    def counts_are_near(self):
        for receiver, held in zip(self.receivers, self.held, strict=True):
            assert abs(receiver.bytes - held) < UNCOUNTED
            assert bool(receiver.bytes) == (held >= UNCOUNTED) == bool(receiver.records)
            if not receiver.gate.is_open:
                assert receiver.bytes == held
        assert self.budget.bytes == sum(receiver.bytes for receiver in self.receivers)
        assert self.budget.records == sum(map(bool, (receiver.bytes for receiver in self.receivers)))

    @invariant()
    def who_holds_little_goes_on(self):
        for receiver, held in zip(self.receivers, self.held, strict=True):
            assert held >= UNCOUNTED or receiver.gate.is_open

    @invariant()
    def each_change_is_told_once(self):
        for told in self.told:
            assert told == [bool(number % 2) for number in range(len(told))]

    def teardown(self):
        for receiver in self.receivers:
            receiver.hold(0)
        assert (self.budget.bytes, self.budget.records, self.budget.waiting) == (0, 0, 0)
        assert all(receiver.gate.is_open for receiver in self.receivers)


TestReceivers = Receivers.TestCase
TestReceivers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(deadline=None)
@given(count=st.integers(1, 40), burst=st.integers(1000, 5000))
def test_those_who_settle_nothing_are_bounded_in_all_and_a_modest_one_is_served_beside_them(count, burst):
    budget = Budget(LIMIT, 10**6)
    stalled = [ReceiverBudget(budget) for _ in range(count)]
    held = dict.fromkeys(stalled, 0)
    while any(one.gate.is_open for one in stalled):
        for one in stalled:
            if one.gate.is_open:
                held[one] += burst
                one.hold(held[one])
    assert sum(held.values()) <= LIMIT + count * (UNCOUNTED + burst)
    assert max(held.values()) - min(held.values()) <= UNCOUNTED + burst
    modest = ReceiverBudget(budget)
    for _ in range(3):
        modest.hold(UNCOUNTED - 1)
        assert modest.gate.is_open
        modest.hold(0)


def test_who_waits_goes_on_when_others_let_go():
    budget = Budget(LIMIT, 10**6)
    first, second = ReceiverBudget(budget), ReceiverBudget(budget)
    first.hold(MOST)
    second.hold(2 * UNCOUNTED)
    assert [first.gate.is_open, second.gate.is_open] == [False, False]
    first.hold(0)
    assert second.gate.is_open
    assert (budget.bytes, budget.records) == (second.bytes, 1)
