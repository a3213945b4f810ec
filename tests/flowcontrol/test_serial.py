"""RFC 1982 on 32 bits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowcontrol.serial import HALF, MODULUS, SerialError, add, distance, is_before

numbers = st.integers(0, MODULUS - 1)


class Counters(RuleBasedStateMachine):
    """Two counters that go forward and wrap, less than half a round apart; the model does not wrap."""

    @initialize(start=numbers)
    def begin(self, start):
        self.ours = self.theirs = start  # the model's

    @rule(increment=st.one_of(st.integers(0, 5), st.integers(0, HALF - 1)), ours=st.booleans())
    def go_forward(self, increment, ours):
        self.go(self.ours + increment * ours, self.theirs + increment * (not ours))

    @rule(increment=st.integers(0, HALF - 1))
    def go_together(self, increment):
        self.go(self.ours + increment, self.theirs + increment)

    def go(self, ours, theirs):
        if abs(ours - theirs) < HALF:
            assert add(self.ours % MODULUS, ours - self.ours) == ours % MODULUS
            assert add(self.theirs % MODULUS, theirs - self.theirs) == theirs % MODULUS
            self.ours, self.theirs = ours, theirs

    @invariant()
    def is_as_the_model(self):
        ours, theirs = self.ours % MODULUS, self.theirs % MODULUS
        assert distance(ours, theirs) == self.ours - self.theirs == -distance(theirs, ours)
        assert is_before(ours, theirs) == (self.ours < self.theirs)
        assert is_before(theirs, ours) == (self.theirs < self.ours)


TestCounters = Counters.TestCase
TestCounters.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(numbers)
def test_half_way_round_has_no_order(number: int) -> None:
    opposite = (number + HALF) % MODULUS
    with pytest.raises(SerialError, match="undefined"):
        distance(number, opposite)


def test_it_wraps() -> None:
    assert add(MODULUS - 1, 1) == 0
    assert distance(0, MODULUS - 2) == 2


@pytest.mark.parametrize("bad", [-1, MODULUS])
def test_what_is_no_serial_number(bad: int) -> None:
    with pytest.raises(SerialError):
        add(bad, 1)
    with pytest.raises(SerialError):
        distance(0, bad)
    with pytest.raises(SerialError):
        add(0, HALF)
    with pytest.raises(SerialError):
        add(0, -1)
