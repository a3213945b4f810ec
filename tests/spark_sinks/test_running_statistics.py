"""Running mean and deviation equal those computed over all values. No Spark is started."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_sinks.transforms.running_statistics import RunningStatistics

USUAL = st.integers(-(10**12), 10**12).map(lambda millionths: millionths / 1e6)  # the square of 1e-200 would be 0


@settings(max_examples=60)
@given(st.lists(USUAL, min_size=2, max_size=60))
def test_running_statistics_equal_those_of_all_values(values: list[float]) -> None:
    running = RunningStatistics()
    for value in values:
        running = running.with_value(value)
    spread = max(map(abs, values)) or 1.0
    assert running.count == len(values)
    assert running.mean == pytest.approx(statistics.fmean(values), abs=1e-9 * spread)
    assert running.deviation == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6 * spread)


def test_a_value_is_compared_with_earlier_ones_once_there_are_enough() -> None:
    running = RunningStatistics()
    for value in (10.0, 12.0, 10.0):
        assert not running.is_beyond(1e9, 3, after=3)
        running = running.with_value(value)
    assert running.deviation == pytest.approx(statistics.stdev([10, 12, 10]))
    assert running.is_beyond(14.5, 3, after=3)
    assert not running.is_beyond(14.0, 3, after=3)
    assert running.is_beyond(7.0, 3, after=3)
    assert not running.is_beyond(14.5, 3, after=4)


@settings(max_examples=60)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30))
def test_the_state_is_finite_for_any_values(values: list[float]) -> None:
    states = [RunningStatistics()]
    for value in values:
        states.append(states[-1].with_value(value))
        assert states[-1].deviation < float("inf")
        states[-1].is_beyond(value, 3, 2)
    assert all(0 <= before.squares <= after.squares for before, after in pairwise(states))
