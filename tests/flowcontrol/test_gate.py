import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowcontrol.gate import Gate


class Listeners(RuleBasedStateMachine):
    """Callbacks come and go: "leave" unsubscribes itself when called, "stir" opens the gate."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.is_open = True
        self.callbacks = {}  # by name, in their order
        self.calls = []

    def callback(self, name):
        def called(is_open):
            self.calls.append((name, is_open))
            if name == "leave":
                self.gate.unsubscribe(self.callbacks.pop(name))
            elif name == "stir" and not is_open:
                self.gate.change(True)

        return called

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

    @rule(is_open=st.booleans())
    def change(self, is_open):
        names, before = list(self.callbacks), self.is_open
        self.calls.clear()
        self.gate.change(is_open)
        expected = []
        if is_open != before:
            expected = [(name, is_open) for name in names]
            if not is_open and "stir" in names:  # opened from within: later callbacks are not called for the shutting
                expected = expected[: names.index("stir") + 1]
                expected += [
                    (name, True) for name in names if name != "leave" or names.index("stir") < names.index("leave")
                ]
                is_open = True
        self.is_open = is_open
        assert self.calls == expected

    @invariant()
    def is_as_the_model(self):
        assert self.gate.is_open == self.is_open


TestListeners = Listeners.TestCase
TestListeners.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_callback_may_unsubscribe_itself_and_others():
    gate = Gate()
    calls = []

    def once(is_open):
        calls.append("once")
        gate.unsubscribe(once)
        gate.unsubscribe(other)

    def other(is_open):
        calls.append("other")

    def last(is_open):
        calls.append("last")

    for callback in (once, other, last):
        gate.subscribe(callback)
    gate.change(False)
    gate.change(True)
    assert calls == ["once", "last", "last"]


def test_a_callback_that_opens_the_gate_again_hides_the_shutting_from_later_callbacks():
    gate = Gate()
    calls = []
    gate.subscribe(lambda is_open: None if is_open else gate.change(True))
    gate.subscribe(calls.append)
    gate.change(False)
    assert gate.is_open
    assert calls == [True]


def test_subscribing_twice_and_unsubscribing_a_stranger_are_our_bugs():
    gate = Gate()
    gate.subscribe(print)
    with pytest.raises(ValueError, match="subscribed"):
        gate.subscribe(print)
    gate.unsubscribe(print)
    with pytest.raises(ValueError, match="not subscribed"):
        gate.unsubscribe(print)
