from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.backoff import Backoff


def test_doubles_up_to_the_cap() -> None:
    backoff = Backoff(0.1, 30.0, random=lambda: 0.0)
    assert [backoff.delay(n) for n in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert backoff.delay(8) == pytest.approx(25.6)
    assert {backoff.delay(n) for n in (9, 10, 1000, 10**6)} == {30.0}


@given(
    curve=st.tuples(st.floats(0.001, 10), st.floats(1, 1000), st.floats(1.01, 10), st.floats(0, 1)),
    chance=st.floats(0, 1, exclude_max=True),
    attempt=st.integers(0, 10**9),
)
def test_stays_within_its_promise(curve: tuple[float, float, float, float], chance: float, attempt: int) -> None:
    base, times, factor, jitter = curve
    cap = base * times
    whole = Backoff(base, cap, factor=factor, jitter=jitter, random=lambda: 0.0)
    delay = Backoff(base, cap, factor=factor, jitter=jitter, random=lambda: chance).delay(attempt)
    assert whole.delay(attempt) * (1 - jitter) <= delay <= whole.delay(attempt) <= cap
    assert whole.delay(attempt) <= whole.delay(attempt + 1)
    assert whole.delay(0) == base


@pytest.mark.parametrize(
    "wrong",
    [{"base": 0}, {"base": -1}, {"cap": 0.01}, {"factor": 1.0}, {"jitter": -0.1}, {"jitter": 1.1}],
)
def test_contradictions_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no backoff"):
        Backoff(**{"base": 0.1, "cap": 1.0, "random": lambda: 0.0, **wrong})


def test_attempts_are_counted_from_zero() -> None:
    with pytest.raises(ValueError, match="negative"):
        Backoff(0.1, 1.0, random=lambda: 0.0).delay(-1)
