"""Requests wait for the records of a fleet, and never for a closed loop: simulated on a clock of its own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.kafka.driver.produce.request_pace import MOST_PER_S, RequestPace

LONGEST_S = 0.003
ROUND_TRIP_S = 0.001


class Clock:
    """A loop with what `RequestPace` uses of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[..., None], *arguments: Any) -> object:
        heapq.heappush(self._calls, (self.now + delay, next(self._numbers), call, arguments))
        return object()

    def run(self, until: float) -> None:
        while self._calls and self._calls[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(self._calls)
            call(*arguments)


class Broker:
    """Answers each request after a round trip. Senders are told, and may send again."""

    def __init__(self, *, busy: float = 0.5, longest_s: float = LONGEST_S, round_trip_s: float = ROUND_TRIP_S) -> None:
        self.clock = Clock()
        self.round_trip_s = round_trip_s
        self.pace = RequestPace(self.clock, longest_s, self._flush, lambda: busy * self.clock.now)
        self.requests: list[list[int]] = []  # senders of each
        self.waited: list[float] = []  # from the answer before
        self.stored: Callable[[int], None] = lambda _sender: None
        self._waiting: list[int] = []
        self._in_flight = False
        self._answered = float("-inf")

    def send(self, sender: int) -> None:
        self._waiting.append(sender)
        self.clock.call_later(0, self._flush)  # at the end of the turn

    def _flush(self) -> None:
        if not self._waiting or self._in_flight or self.pace.holds():
            return
        sent, self._waiting, self._in_flight = self._waiting, [], True
        self.requests.append(sent)
        self.waited.append(self.clock.now - self._answered)
        self.pace.written(lambda: frozenset(sent))
        self.clock.call_later(self.round_trip_s, self._answer, sent)

    def _answer(self, sent: list[int]) -> None:
        self._in_flight = False
        self._answered = self.clock.now
        for sender in sent:
            self.stored(sender)
        self.pace.answered(len(sent))
        self._flush()


def fleet(broker: Broker, senders: int, rate: float, seconds: float) -> None:
    """Each sender sends `rate` a second, at a phase of its own."""

    def send(sender: int) -> None:
        broker.send(sender)
        broker.clock.call_later(1 / rate, send, sender)

    for sender in range(senders):
        broker.clock.call_later(sender / senders / rate, send, sender)
    broker.clock.run(broker.clock.now + seconds)


def closed_loop(broker: Broker, senders: int, window: int, seconds: float, spread_s: float) -> None:
    """Each sender keeps its window full; answers reach them spread over a time, as on a busy machine."""

    def stored(sender: int) -> None:
        broker.clock.call_later(spread_s * sender / senders, broker.send, sender)

    broker.stored = stored
    for sender in range(senders):
        for _ in range(window):
            stored(sender)
    broker.clock.run(broker.clock.now + seconds)


@pytest.mark.parametrize(("senders", "rate"), [(1000, 10.0), (5000, 1.0), (5000, 5.0)])
def test_a_fleet_shares_requests(senders: int, rate: float) -> None:
    waiting, alone = Broker(), Broker(longest_s=0)
    fleet(waiting, senders, rate, 1.0)
    fleet(alone, senders, rate, 1.0)
    assert waiting.pace.is_worth_it
    assert len(waiting.requests) < len(alone.requests) / 2
    assert max(waiting.waited[1:]) <= LONGEST_S + 1 / (senders * rate) + 1e-9


@pytest.mark.parametrize(("senders", "window"), [(1, 1), (10, 20), (100, 1), (300, 1), (64, 3)])
@pytest.mark.parametrize("spread_s", [0.0, 0.0005, 0.0015, 0.004])
def test_a_closed_loop_never_waits(senders: int, window: int, spread_s: float) -> None:
    broker = Broker()
    closed_loop(broker, senders, window, 0.7, spread_s)
    assert broker.pace.waits == 0


def test_while_the_processor_has_time_to_spare_nothing_waits() -> None:
    broker = Broker(busy=0.2)
    fleet(broker, 1000, 10.0, 1.0)
    assert broker.pace.waits == 0


def test_at_a_rate_that_fills_requests_nothing_waits() -> None:
    broker = Broker()
    fleet(broker, 10_000, 1.2 * MOST_PER_S / 10_000, 0.5)
    assert broker.pace.waits == 0


def test_few_records_now_and_then_do_not_wait() -> None:
    broker = Broker()
    fleet(broker, 500, 1.0, 3.0)
    assert broker.pace.waits == 0


def test_when_a_fleet_becomes_a_closed_loop_the_waits_end() -> None:
    broker = Broker()
    fleet(broker, 1000, 10.0, 1.0)
    assert broker.pace.is_worth_it
    broker.clock._calls.clear()
    broker._waiting, broker._in_flight, broker.pace._timer = [], False, None
    closed_loop(broker, 100, 1, 1.0, 0.0005)
    assert not broker.pace.is_worth_it


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(0, 500)), min_size=1, max_size=2000),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.001, LONGEST_S, 1.0]),
    st.sampled_from([ROUND_TRIP_S, 0.03, 0.5]),
)
def test_every_record_leaves_after_the_longest_wait(
    arrivals: list[tuple[float, int]], busy: float, longest_s: float, round_trip_s: float
) -> None:
    broker = Broker(busy=busy, longest_s=longest_s, round_trip_s=round_trip_s)
    at = 0.0
    for pause, sender in arrivals:
        at += pause
        broker.clock.call_later(at, broker.send, sender)
    broker.clock.run(float("inf"))
    assert sorted(itertools.chain(*broker.requests)) == sorted(sender for _, sender in arrivals)
    held = sum(waited > 1e-9 for waited in broker.waited)
    assert broker.pace.waits <= held
