import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.gate import Gate


def test_shuts_at_high_and_opens_at_low():
    gate = Gate(high=10, low=5)
    states = []
    for level in (9, 10, 9, 6, 5, 9, 10):
        gate.level(level)
        states.append(gate.is_open)
    assert states == [True, False, False, False, True, True, False]


@pytest.mark.parametrize(("high", "low"), [(5, 5), (5, 6), (5, -1), (0, 0)])
def test_marks_must_leave_a_distance(high, low):
    with pytest.raises(ValueError, match="low"):
        Gate(high=high, low=low)


@given(st.lists(st.integers(0, 20)))
def test_each_transition_is_told_once_and_in_order(levels):
    gate = Gate(high=10, low=5)
    told = []
    gate.subscribe(lambda is_open: told.append(("first", is_open)))
    gate.subscribe(lambda is_open: told.append(("second", is_open)))
    before, transitions = True, []
    for level in levels:
        gate.level(level)
        assert gate.is_open or level > 5
        assert not gate.is_open or level < 10
        if gate.is_open != before:
            before = gate.is_open
            transitions += [("first", before), ("second", before)]
    assert told == transitions


def test_a_callback_may_unsubscribe_itself_and_others():
    gate = Gate(high=2, low=1)
    told = []

    def once(is_open):
        told.append("once")
        gate.unsubscribe(once)
        gate.unsubscribe(other)

    def other(is_open):
        told.append("other")

    def last(is_open):
        told.append("last")

    for callback in (once, other, last):
        gate.subscribe(callback)
    gate.level(2)
    gate.level(0)
    assert told == ["once", "last", "last"]


def test_a_callback_that_moves_the_level_back_leaves_no_stale_news():
    gate = Gate(high=2, low=1)
    told = []
    gate.subscribe(lambda is_open: None if is_open else gate.level(0))
    gate.subscribe(told.append)
    gate.level(2)
    assert gate.is_open
    assert told == [True]


def test_subscribing_twice_and_unsubscribing_a_stranger_are_our_bugs():
    gate = Gate(high=2, low=1)
    gate.subscribe(print)
    with pytest.raises(ValueError, match="subscribed"):
        gate.subscribe(print)
    gate.unsubscribe(print)
    with pytest.raises(ValueError, match="not subscribed"):
        gate.unsubscribe(print)
