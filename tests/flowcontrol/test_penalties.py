"""Answers to failures are delayed longer each time, up to a limit; names are forgotten after a pause or many others."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowcontrol.penalties import Penalties

BASE_S, LIMIT_S, FORGET_S, NAMES = 0.5, 5.0, 60.0, 3


class Attempts(RuleBasedStateMachine):
    """Failing names, and passing time."""

    def __init__(self):
        super().__init__()
        self.penalties = Penalties(BASE_S, LIMIT_S, forget_s=FORGET_S, names=NAMES)
        self.now = 0.0
        self.failed = {}  # in the order of the last failure: how many in a row, when, the unanswered penalties

    @rule(name=st.sampled_from("abcde"))
    def fail(self, name):
        count, last, waiting = self.failed.pop(name, (0, self.now, 0))
        count = 0 if self.now - last > FORGET_S else count
        penalty = self.penalties.fail(name, self.now)
        assert penalty.delay == min(LIMIT_S, BASE_S * 2**count)
        self.failed[name] = (count + 1, self.now, waiting + 1)
        while len(self.failed) > NAMES:
            del self.failed[next(iter(self.failed))]

    @rule(seconds=st.sampled_from([0.1, 30.0, 61.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @invariant()
    def remembers_those_who_failed_last(self):
        assert len(self.penalties) == len(self.failed)
        for name in "abcde":
            assert self.penalties.waiting(name) == self.failed.get(name, (0, 0.0, 0))[2]


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
