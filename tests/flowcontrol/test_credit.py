from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowcontrol.credit import Inflight, WindowError


def test_counts() -> None:
    window = Inflight(3)
    window.take(2)
    assert (window.used, window.free) == (2, 1)
    window.release()
    assert (window.used, window.free) == (1, 2)


def test_neither_end_is_clamped() -> None:
    window = Inflight(2)
    window.take(2)
    with pytest.raises(WindowError):
        window.take()
    assert window.used == 2
    window.release(2)
    with pytest.raises(WindowError):
        window.release()
    assert window.used == 0


@pytest.mark.parametrize("count", [-1, -5])
def test_a_negative_count_is_not_the_other_direction(count: int) -> None:
    window = Inflight(10)
    window.take(5)
    with pytest.raises(WindowError):
        window.take(count)
    with pytest.raises(WindowError):
        window.release(count)
    assert window.used == 5


def test_needs_room_for_one() -> None:
    with pytest.raises(ValueError, match="at least"):
        Inflight(0)


class Exchange(RuleBasedStateMachine):
    """Messages that are sent and acknowledged; the model is a number."""

    @initialize(limit=st.integers(1, 20))
    def begin(self, limit: int) -> None:
        self.window, self.limit, self.used = Inflight(limit), limit, 0

    @rule(count=st.integers(-2, 8))
    def take(self, count: int) -> None:
        if count >= 0 and self.used + count <= self.limit:
            self.window.take(count)
            self.used += count
        else:
            with pytest.raises(WindowError):
                self.window.take(count)

    @rule(count=st.integers(-2, 8))
    def release(self, count: int) -> None:
        if 0 <= count <= self.used:
            self.window.release(count)
            self.used -= count
        else:
            with pytest.raises(WindowError):
                self.window.release(count)

    @invariant()
    def is_as_the_model(self) -> None:
        assert (self.window.used, self.window.free) == (self.used, self.limit - self.used)


TestExchange = Exchange.TestCase
TestExchange.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
