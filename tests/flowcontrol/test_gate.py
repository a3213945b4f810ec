import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


class Listeners(RuleBasedStateMachine):
    """A level that moves, and callbacks that come and go, also from within a call: "leave" goes, "stir" changes it."""

    def __init__(self):
        super().__init__()
        self.gate = Gate(high=10, low=5)
        self.is_open = True
        self.callbacks = {}  # by name, in their order
        self.told = []

    def callback(self, name):
        def told(is_open):
            self.told.append((name, is_open))
            if name == "leave":
                self.gate.unsubscribe(self.callbacks.pop(name))
            elif name == "stir" and not is_open:
                self.gate.level(0)

        return told

    @rule(name=st.sampled_from(["first", "leave", "stir", "last"]))
    def subscribe(self, name):
        if name not in self.callbacks:
            self.callbacks[name] = self.callback(name)
            self.gate.subscribe(self.callbacks[name])
        else:
            with pytest.raises(ValueError, match="subscribed"):
                self.gate.subscribe(self.callbacks[name])

    @rule(name=st.sampled_from(["first", "stir", "last"]))
    def unsubscribe(self, name):
        callback = self.callbacks.pop(name, None)
        if callback is not None:
            self.gate.unsubscribe(callback)
        with pytest.raises(ValueError, match="not subscribed"):
            self.gate.unsubscribe(callback)

    @rule(level=st.integers(0, 15))
    def move(self, level):
        self.turn(lambda: self.gate.level(level), level <= 5 if not self.is_open else level < 10)

    @rule(is_open=st.booleans())
    def change(self, is_open):
        self.turn(lambda: self.gate.change(is_open), is_open)

    def turn(self, act, is_open):
        names, before = list(self.callbacks), self.is_open
        self.told.clear()
        act()
        expected = []
        if is_open != before:
            expected = [(name, is_open) for name in names]
            if not is_open and "stir" in names:  # opened from within: those behind it never hear that it was shut
                expected = expected[: names.index("stir") + 1]
                expected += [
                    (name, True) for name in names if name != "leave" or names.index("stir") < names.index("leave")
                ]
                is_open = True
        self.is_open = is_open
        assert self.told == expected

    @invariant()
    def is_as_the_model(self):
        assert self.gate.is_open == self.is_open


TestListeners = Listeners.TestCase
TestListeners.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


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
