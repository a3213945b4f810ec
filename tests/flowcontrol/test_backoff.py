from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from flowcontrol.backoff import JITTER, backoff_s


def test_doubles_up_to_the_cap() -> None:
    delay = partial(backoff_s, base=0.1, cap=30.0, random=lambda: 0.0)
    assert [delay(n) for n in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert delay(8) == pytest.approx(25.6)
    assert {delay(n) for n in (9, 10, 1000, 10**6)} == {30.0}


class Attempts(RuleBasedStateMachine):
    """Attempts that fail with any rng, and start again at 0 after a success. The model multiplies step by step."""

    @initialize(base=st.floats(0.001, 10), cap=st.floats(10, 1000))
    def begin(self, base: float, cap: float) -> None:
        self.rng = 0.0
        self.base, self.cap = base, cap
        self.delay = partial(backoff_s, base=base, cap=cap, random=lambda: self.rng)
        self.failures, self.whole = 0, base

    @rule(rng=st.floats(0, 1, exclude_max=True))
    def fail(self, rng: float) -> None:
        self.rng = rng
        delay = self.delay(self.failures)
        assert delay <= self.cap
        assert delay == pytest.approx(self.whole * (1 - JITTER * rng))
        self.failures += 1
        self.whole = min(self.cap, self.whole * 2)

    @rule()
    def succeed(self) -> None:
        self.failures, self.whole = 0, self.base

    @rule(attempt=st.integers(10**4, 10**9))
    def fail_for_ever(self, attempt: int) -> None:
        self.rng = 0.0
        assert self.delay(attempt) == self.cap


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
