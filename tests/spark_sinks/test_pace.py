"""When a query may run in real time, by steps of a clock that the test has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_sinks.pace import FEW_RECORDS, FIRST_HOLD_S, LONGEST_HOLD_S, RELAPSE_S, Pace


def test_a_backlog_is_caught_up_until_it_is_fresh() -> None:
    pace = Pace(5)
    pace.look(0, 100_000)
    assert pace.lag(0) == 100_000
    assert not pace.fast(0, 0)
    pace.look(8, 108_000)
    assert not pace.fast(8, 100_000)  # what it has not read is up to 8 s old
    pace.look(12, 112_000)
    assert pace.fast(12, 108_000)


def test_a_few_records_are_no_backlog_however_old() -> None:
    pace = Pace(5)
    pace.look(0, FEW_RECORDS)
    assert pace.fast(0, 0)
    assert not pace.slow(1_000, 0)


def test_nothing_is_fast_before_the_broker_was_asked() -> None:
    assert not Pace(5).fast(0, 0)


def test_who_falls_behind_again_and_again_waits_longer_each_time() -> None:
    pace = Pace(5)
    now, end = 0.0, 0
    holds = []
    for _ in range(10):
        end += 10_000
        pace.look(now, end)
        assert pace.slow(now + 6, end - 5_000)
        fell = now = now + 6
        while not pace.fast(now, end):
            now += 1
        holds.append(now - fell)
    assert holds[:3] == [0, FIRST_HOLD_S, 2 * FIRST_HOLD_S]
    assert holds == sorted(holds)
    assert holds[-1] == LONGEST_HOLD_S
    now += LONGEST_HOLD_S + RELAPSE_S  # long enough without a relapse
    pace.look(now, end + 10_000)
    assert pace.slow(now + 6, end)
    assert pace.fast(now + 6, end + 10_000)


def test_a_burst_after_a_long_silence_is_fresh() -> None:
    pace = Pace(5)
    pace.look(0, 500)
    pace.look(3_600, 500)
    pace.look(3_601, 50_000)
    assert pace.behind(3_601, 500) == 1
    assert not pace.slow(3_601, 500)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 50_000)), min_size=1, max_size=30), st.data())
def test_behind_is_the_age_of_the_first_record_not_read(steps: list[tuple[float, int]], data: st.DataObject) -> None:
    pace = Pace(5)
    now, end = 0.0, 0
    looks = []
    position = 0
    for wait, arrived in steps:
        now, end = now + wait, end + arrived
        pace.look(now, end)
        looks.append((now, end))
        position = data.draw(st.integers(position, end))
        behind = pace.behind(now, position)
        if position == end:
            assert behind == 0
        elif position < looks[0][1]:
            assert behind == float("inf")
        else:  # it arrived after the last look at which everything was before `position`
            assert behind == now - max(at for at, seen in looks if seen == max(e for _, e in looks if e <= position))
