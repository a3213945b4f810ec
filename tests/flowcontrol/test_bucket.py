"""A rate holds for any arrivals; a sender in debt waits exactly until the debt is paid."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowcontrol.bucket import Bucket, BucketError, RateLimit

RATES = st.sampled_from([1, 4, 50, 1024])
EIGHTHS = st.integers(0, 400)  # of a second: no rounding


class Sender(RuleBasedStateMachine):
    """Spends at any time. The model keeps everything that was ever spent, and sums it up for each check."""

    @initialize(rate=RATES, burst=st.integers(1, 100))
    def begin(self, rate, burst):
        self.now = Fraction(0)
        self.rate, self.burst = rate, burst
        self.bucket = Bucket(rate, burst, 0.0)
        self.events = []  # when, and how many tokens less

    def level(self):
        """Return the tokens that arrive after the moment at which the most would have overflowed."""
        tokens, at = Fraction(self.burst), Fraction(0)
        for when, spent in [*self.events, (self.now, 0)]:
            tokens = min(Fraction(self.burst), tokens + (when - at) * self.rate) - spent
            tokens, at = min(Fraction(self.burst), tokens), when
        return tokens

    @rule(eighths=EIGHTHS)
    def pass_time(self, eighths):
        self.now += Fraction(eighths, 8)

    @rule(tokens=st.integers(0, 200))
    def spend(self, tokens):
        self.events.append((self.now, tokens))
        assert self.bucket.spend(tokens, float(self.now)) == self.level()

    @rule(tokens=st.integers(0, 200))
    def give_back(self, tokens):
        self.events.append((self.now, -tokens))
        self.bucket.give_back(tokens, float(self.now))

    @rule(tokens=st.integers(0, 100))
    def wait(self, tokens):
        """After the wait there are as many tokens as requested, and a moment before there were not."""
        asked = min(tokens, self.burst)
        wait = Fraction(self.bucket.wait_s(float(self.now), tokens))
        assert (wait == 0) == (self.level() >= asked)
        self.now += wait
        assert float(self.level()) >= asked or float(self.level()) == pytest.approx(asked)
        if wait:
            assert float(self.level()) == pytest.approx(asked)
        self.now = Fraction(round(self.now * 8), 8) if wait == 0 else self.now + (-self.now) % Fraction(1, 8)

    @rule(eighths=st.integers(1, 5))
    def look_back(self, eighths):
        assert self.bucket.level(float(self.now)) == self.bucket.level(float(self.now - Fraction(eighths, 8)))

    @rule()
    def less_than_nothing(self):
        for call in (self.bucket.spend, self.bucket.give_back):
            with pytest.raises(BucketError):
                call(-1, float(self.now))

    @invariant()
    def is_as_the_model(self):
        assert float(self.level()) == pytest.approx(self.bucket.level(float(self.now)))
        assert self.bucket.level(float(self.now)) <= self.burst


TestSender = Sender.TestCase
TestSender.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(rate=st.integers(1, 5000), sizes=st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_who_waits_out_each_debt_has_its_rate(rate, sizes):
    """However large the bursts: at the end of a debt, exactly the tokens of the elapsed time have been spent."""
    bucket, now = Bucket(rate, rate, 0.0), 0.0
    for size in sizes:
        bucket.spend(size, now)
        now += bucket.wait_s(now)
    if now:
        bucket.spend(max(0.0, bucket.level(now)), now)
        assert now * rate <= sum(sizes) - rate + 1e-6 * sum(sizes)
        assert sum(sizes) <= rate + now * rate + 1e-6 * sum(sizes)


def test_the_stricter_of_two_rates_holds():
    limit = RateLimit(10, 1000, 1.0, 0.0)
    assert limit.affordable(100, 10, 0.0) == 10
    assert limit.affordable(100, 500, 0.0) == 2
    limit.spend(10, 100, 0.0)
    assert (limit.wait_s(0.0), limit.affordable(100, 1, 0.0)) == (0, 0)
    limit.spend(1, 2000, 0.0)
    assert limit.wait_s(0.0) == pytest.approx(1.1)  # the bytes'; a message's would be 0.1
    limit.give_back(1, 0.0)
    assert limit.wait_s(0.0) == pytest.approx(1.1)
    assert limit.wait_s(1.1) == 0


def test_one_message_that_is_larger_than_a_burst_may_go_when_a_whole_one_is_there():
    limit = RateLimit(0, 1000, 1.0, 0.0)
    assert limit.affordable(5, 3000, 0.0) == 1
    limit.spend(1, 3000, 0.0)
    assert limit.wait_s(0.0) == pytest.approx(2.0)
    assert limit.wait_s(0.0, 0.05, 3000) == pytest.approx(3.0)
    assert limit.affordable(5, 3000, 2.0) == 0
    assert limit.affordable(5, 3000, 3.0) == 1


def test_a_slow_rate_lets_one_message_go():
    limit = RateLimit(0.5, 0, 1.0, 0.0)
    assert limit.affordable(5, 1, 0.0) == 1
    limit.spend(1, 1, 0.0)
    assert limit.wait_s(0.0, 0.05) == pytest.approx(2.0)
    assert limit.affordable(5, 1, 2.0) == 1


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1), (float("inf"), 1)])
def test_what_is_no_bucket(rate, burst):
    with pytest.raises(ValueError, match="above 0"):
        Bucket(rate, burst, 0.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3))), st.floats(0.5, 50))
def test_a_debt_is_never_larger_than_its_limit(spendings: list[tuple[float, float]], most_debt: float) -> None:
    """So whoever waits, waits at most `most_debt / rate`, whatever another spent."""
    bucket, now = Bucket(2.0, 4.0, 0.0, most_debt), 0.0
    for tokens, pause in spendings:
        now += pause
        before = bucket.level(now)
        left = bucket.spend(tokens, now)
        assert left == pytest.approx(max(before - tokens, -most_debt))
        assert bucket.wait_s(now) <= most_debt / 2.0
