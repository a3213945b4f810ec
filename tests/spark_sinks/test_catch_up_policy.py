"""When a query may run in real-time mode, with a simulated clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_sinks.spark.catch_up_policy import FEW_RECORDS, FIRST_HOLD_S, LONGEST_HOLD_S, RELAPSE_S, CatchUpPolicy


def test_catching_up_lasts_until_the_records_are_recent() -> None:
    policy = CatchUpPolicy(5)
    policy.observe_end(0, 100_000)
    assert policy.lag(0) == 100_000
    assert not policy.may_run_in_real_time(0, 0)
    policy.observe_end(8, 108_000)
    assert not policy.may_run_in_real_time(8, 100_000)  # unread records are up to 8 s old
    policy.observe_end(12, 112_000)
    assert policy.may_run_in_real_time(12, 108_000)


def test_a_few_records_are_no_backlog_however_old() -> None:
    policy = CatchUpPolicy(5)
    policy.observe_end(0, FEW_RECORDS)
    assert policy.may_run_in_real_time(0, 0)
    assert not policy.must_catch_up(1_000, 0)


def test_real_time_needs_the_brokers_end_offsets() -> None:
    assert not CatchUpPolicy(5).may_run_in_real_time(0, 0)


def test_each_relapse_makes_the_wait_longer() -> None:
    policy = CatchUpPolicy(5)
    now, end = 0.0, 0
    holds = []
    for _ in range(10):
        end += 10_000
        policy.observe_end(now, end)
        assert policy.must_catch_up(now + 6, end - 5_000)
        fell = now = now + 6
        while not policy.may_run_in_real_time(now, end):
            now += 1
        holds.append(now - fell)
    assert holds[:3] == [0, FIRST_HOLD_S, 2 * FIRST_HOLD_S]
    assert holds == sorted(holds)
    assert holds[-1] == LONGEST_HOLD_S
    now += LONGEST_HOLD_S + RELAPSE_S  # long enough without a relapse
    policy.observe_end(now, end + 10_000)
    assert policy.must_catch_up(now + 6, end)
    assert policy.may_run_in_real_time(now + 6, end + 10_000)


def test_a_burst_after_a_long_pause_is_recent() -> None:
    policy = CatchUpPolicy(5)
    policy.observe_end(0, 500)
    policy.observe_end(3_600, 500)
    policy.observe_end(3_601, 50_000)
    assert policy.lag_s(3_601, 500) == 1
    assert not policy.must_catch_up(3_601, 500)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 50_000)), min_size=1, max_size=30), st.data())
def test_behind_is_the_age_of_the_first_record_not_read(steps: list[tuple[float, int]], data: st.DataObject) -> None:
    policy = CatchUpPolicy(5)
    now, end = 0.0, 0
    looks = []
    position = 0
    for wait, arrived in steps:
        now, end = now + wait, end + arrived
        policy.observe_end(now, end)
        looks.append((now, end))
        position = data.draw(st.integers(position, end))
        behind = policy.lag_s(now, position)
        if position == end:
            assert behind == 0
        elif position < looks[0][1]:
            assert behind == float("inf")
        else:  # it arrived after the last observation at which all records were before `position`
            assert behind == now - max(at for at, seen in looks if seen == max(e for _, e in looks if e <= position))
