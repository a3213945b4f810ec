"""Shares of limits: admission, debts that outlive connections, and turns of waiters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcontrol.bucket import RateLimit
from gateway.limits import limits as limits_module
from gateway.limits.brakes import Brake, Pace
from gateway.limits.limits import ClientLimits, LimitExceeded, Limits
from gateway.limits.rate_pauses import CreditPause, ReadingPause, SendingPause
from gateway.security.identity import ANONYMOUS, Identity
from gateway.settings.config import LimitsConfig
from gateway.settings.limits import LimitRule
from gateway.views.pauses import OUTGOING_RATES, RATES, pauses
from tests.support.limit_time import Time, limits_at


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return limits_at(monkeypatch)


def door(limits: Limits, listener: str = "mqtt") -> Callable[..., ClientLimits]:
    """Count a client at a listener."""

    def enter(identity: Identity, address: str = "a", former: ClientLimits | None = None) -> ClientLimits:
        found = limits.enter(identity, address, listener, former)
        assert found is not None
        return found

    return enter


def ann(number: int = 0, **fields: Any) -> Identity:
    return Identity(f"ann-{number}" if number else "ann", "password", **fields)


# admission


def test_connections_of_a_principal_are_counted_on_all_its_connections(time: Time) -> None:
    limits = Limits(LimitsConfig(rules=(LimitRule(per="principal", connections=2),)), time, ("mqtt", "amqp"))
    mqtt, amqp = door(limits), door(limits, "amqp")
    one, other = mqtt(ann(), "a"), amqp(ann(), "b")
    with pytest.raises(LimitExceeded, match="too many connections of the principal") as refused:
        mqtt(ann(), "a")
    assert refused.value.kind == "connections"
    mqtt(ann(1), "a")  # another principal
    mqtt(ANONYMOUS, "a")  # each address is one
    mqtt(ANONYMOUS, "b")
    replacing = mqtt(ann(), "a", former=one)  # which ends the former connection
    with pytest.raises(LimitExceeded):
        mqtt(ann(), "a", former=replacing)  # but only once
    one.leave()
    one.leave()  # told twice
    with pytest.raises(LimitExceeded):
        mqtt(ann(), "a")
    other.leave()
    mqtt(ann(), "a")
    assert limits.statistics().refused_connections_total == {"connections": 3, "connects": 0}


def test_a_refused_connection_counts_for_no_limit(time: Time) -> None:
    rules = (LimitRule(per="principal", connections=1), LimitRule(per="listener", connections=3))
    mqtt = door(Limits(LimitsConfig(rules=rules), time, ("mqtt",)))
    mqtt(ann(), "a")
    for _ in range(5):
        with pytest.raises(LimitExceeded, match="principal"):
            mqtt(ann(), "a")
    mqtt(ann(1), "a")
    mqtt(ann(2), "a")
    with pytest.raises(LimitExceeded, match="listener"):
        mqtt(ann(3), "a")


def test_connects_a_second(time: Time) -> None:
    rules = (LimitRule(per="listener", connects_per_s=2, listener="mqtt"),)
    limits = Limits(LimitsConfig(rules=rules, burst_s=2), time, ("mqtt", "http"))
    mqtt = door(limits)
    for number in range(4):
        mqtt(ann(number), "a")
    with pytest.raises(LimitExceeded, match="too many connects a second of the listener") as refused:
        mqtt(ann(5), "a")
    assert (refused.value.kind, refused.value.wait_s) == ("connects", pytest.approx(0.5))
    assert limits.enter(ann(5), "a", "http") is not None
    time.pass_to(0.5)
    mqtt(ann(6), "a")
    with pytest.raises(LimitExceeded):
        mqtt(ann(7), "a")


def test_without_rules_there_is_nothing_to_hold(time: Time) -> None:
    limits = Limits(LimitsConfig(), time, ("mqtt",))
    assert limits.enter(ann(), "a", "mqtt") is None
    assert not limits.statistics().shares


def test_an_exception_has_no_limits(time: Time) -> None:
    rules = (
        LimitRule(per="principal", principal="ann"),
        LimitRule(per="principal", in_messages_per_s=1, connections=1),
    )
    mqtt = door(Limits(LimitsConfig(rules=rules), time, ("mqtt",)))
    found = [mqtt(ann(), "a") for _ in range(3)]
    assert all(one.incoming is None for one in found)
    other = mqtt(ann(1), "a")
    assert other.incoming is not None


# debts that outlive connections


def test_who_comes_back_still_owes_and_who_owes_nothing_is_forgotten(time: Time) -> None:
    limits = Limits(LimitsConfig(rules=(LimitRule(per="principal", in_messages_per_s=10),)), time, ("mqtt",))
    mqtt = door(limits)
    one = mqtt(ann(), "a")
    assert one.incoming is not None
    one.incoming.spend(30, 0)
    one.leave()
    again = mqtt(ann(), "a")
    assert again.incoming is not None
    assert again.incoming.owed()[0] == pytest.approx(2.0)
    again.leave()
    time.pass_to(2.5)  # all is paid, and half of the burst is there
    assert limits.statistics().shares == {"principal": 1}
    time.pass_to(3.1)
    assert not limits.statistics().shares


def test_memory_is_bounded_whatever_they_owe(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "REMEMBERED", 50)
    limits = Limits(LimitsConfig(rules=(LimitRule(per="principal", in_messages_per_s=1),)), time, ("mqtt",))
    mqtt = door(limits)
    stays = [mqtt(ann(number), "a") for number in range(1, 11)]
    for number in range(100, 1100):
        one = mqtt(ann(number), "a")
        assert one.incoming is not None
        one.incoming.spend(1000, 0)
        one.leave()
    assert limits.statistics().shares == {"principal": 50 + len(stays)}


# waiters


def brake(rate: float, burst_s: float, time: Time, *, size: bool = False) -> Brake:
    limit = RateLimit(0 if size else rate, rate if size else 0, burst_s, time.now)
    return Brake(limit, OUTGOING_RATES[0], 0.2, time)


class Receiver:
    """A receiver that gets messages one by one while it has no debt; there are always more."""

    def __init__(self, limits: tuple[Brake, ...], time: Time, sizes: list[int], sent: list[tuple[float, int]]) -> None:
        self.total = 0
        self._time = time
        self._sizes = itertools.cycle(sizes)
        self._sent = sent
        self.pause = SendingPause(Pace(limits, time), "it", self.send)

    def send(self) -> None:
        while not self.pause.must_wait():
            size = next(self._sizes)
            self.pause.spend(1, size)
            self.total += size
            self._sent.append((self._time.now, size))


def passes_at_most(sent: list[tuple[float, int]], burst: float, rate: float) -> None:
    """In any period: at most the burst, the period's share, and one message."""
    largest = max(size for _, size in sent)
    low, before = 0.0, 0  # the lowest of (spent before) - rate * time: any window begins there
    for when, size in sent:
        low = min(low, before - rate * when)
        before += size
        assert before - rate * when - low <= burst + largest + 1e-6 * before


@given(
    rate=st.integers(100, 2000),
    burst_s=st.sampled_from((0.1, 1.0, 5.0)),
    sizes=st.lists(st.lists(st.integers(20, 2000), min_size=1, max_size=5), min_size=1, max_size=8),
)
@settings(max_examples=30)
def test_a_shared_limit_is_kept_in_any_time_and_used_up(rate: int, burst_s: float, sizes: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        time = limits_at(patch)
        shared = brake(rate, burst_s, time, size=True)
        sent: list[tuple[float, int]] = []
        receivers = [Receiver((shared,), time, one, sent) for one in sizes]
        for one in receivers:
            one.send()
        seconds = 10.0
        time.pass_to(seconds)
        passes_at_most(sent, rate * burst_s, rate)
        assert sum(size for _, size in sent) >= rate * (seconds - 0.4) - max(map(max, sizes))
        for one in receivers:
            one.pause.end()
        assert not time.waits


def test_who_shares_a_limit_has_a_turn(time: Time) -> None:
    """Equal waiters get the same, in whatever order they came."""
    shared = brake(1000, 1.0, time)
    sent: list[tuple[float, int]] = []
    receivers = [Receiver((shared,), time, [1], sent) for _ in range(10)]
    for one in receivers:
        one.send()
    assert [one.total > 0 for one in receivers] == [True] + 9 * [False]  # the burst
    before = [one.total for one in receivers]
    time.pass_to(60.0)
    found = [one.total - was for one, was in zip(receivers, before, strict=True)]
    assert sum(found) == pytest.approx(60_000, rel=0.02)
    assert max(found) - min(found) <= 2 * 1000 * 0.2 + 2  # two turns of a fifth of a second


def test_two_limits_with_others_waiting_at_each_are_no_dead_end(time: Time) -> None:
    one, other = brake(100, 1.0, time), brake(150, 1.0, time)
    sent: list[tuple[float, int]] = []
    both = [Receiver((one, other), time, [1], sent) for _ in range(3)]
    only = [Receiver((brakes,), time, [1], sent) for brakes in (one, other) for _ in range(2)]
    for receiver in (*both, *only):
        receiver.send()
    before = [receiver.total for receiver in both]
    time.pass_to(60.0)
    assert all(receiver.total - was > 200 for receiver, was in zip(both, before, strict=True))


def test_who_comes_to_be_sent_something_is_behind_those_who_wait(time: Time) -> None:
    shared = brake(10, 1.0, time)
    sent: list[tuple[float, int]] = []
    first = Receiver((shared,), time, [1], sent)
    first.send()
    time.pass_to(0.15)  # one message's worth is there; the first waits for two
    late = Receiver((shared,), time, [1], sent)
    assert late.pause.must_wait()
    before = first.total
    time.pass_to(0.35)
    assert first.total > before


def test_reading_goes_on_in_turns_that_are_worth_what_was_read_before(time: Time) -> None:
    """Three connections that read 100 at a time share 100 a second: they resume one after the other."""
    limit = Brake(RateLimit(100, 0, 1.0, 0.0), RATES[1], 0.05, time)
    paused: dict[int, str] = {}
    reads: list[int] = []
    connections: list[ReadingPause] = []

    def read(number: int) -> None:
        reads.append(number)
        connections[number].spend(100, 0)

    def connection(number: int) -> ReadingPause:
        def resume(reason: str) -> None:
            assert paused.pop(number) == reason
            time.call_later(0.001, lambda: read(number))  # when the socket has something

        return ReadingPause(Pace((limit,), time), lambda reason: paused.update({number: reason}), resume)

    connections += [connection(number) for number in range(3)]
    for one in connections:
        one.spend(100, 0)
    assert paused == dict.fromkeys((1, 2), RATES[1])  # the burst was the first one's
    connections[0].spend(100, 0)
    time.pass_to(30.0)
    assert reads == [*itertools.islice(itertools.cycle((1, 2, 0)), len(reads))]
    assert len(reads) == pytest.approx(30 - 3, abs=1)


def test_a_client_that_publishes_too_much_is_sent_away_where_the_limit_says_so(time: Time) -> None:
    limit = Brake(RateLimit(5, 0, 1.0, 0.0), RATES[0], 0.05, time, disconnects=True)
    ended: list[float] = []
    pause = ReadingPause(Pace((limit,), time), pytest.fail, pytest.fail, lambda: ended.append(time.now))
    pause.spend(5, 0)
    assert not ended
    pause.spend(1, 0)
    assert ended == [0.0]


def test_links_that_wait_for_credit_get_it_when_it_is_there(time: Time) -> None:
    shared = Brake(RateLimit(100, 0, 1.0, 0.0), RATES[0], 0.05, time)
    granted: dict[tuple[int, int], int] = {}
    peers = [CreditPause(Pace((shared,), time), f"peer {number}") for number in range(2)]

    def ask(peer: int, link: int) -> None:
        def again() -> None:
            granted[peer, link] = granted.get((peer, link), 0) + peers[peer].grant(20, 10.0, again, 0)

        again()

    for peer, link in itertools.product(range(2), range(2)):
        ask(peer, link)
    assert sum(granted.values()) == 80
    ask(0, 2)
    assert sum(granted.values()) == 100
    for peer, link in itertools.product(range(2), range(3, 5)):
        ask(peer, link)
    assert sum(granted.values()) == 100
    assert {pause.reason for each in pauses.open().values() for pause in each} >= {RATES[0]}
    for _ in range(20):
        time.pass_to(time.now + 0.1)
    assert all(granted[peer, link] > 0 for peer, link in itertools.product(range(2), range(3, 5)))
    for peer in peers:
        peer.end()
    assert "peer 0" not in pauses.open()
    assert not time.waits


def test_links_that_wait_for_bytes_get_credit_for_what_the_limit_covers(time: Time) -> None:
    """Credit is charged in messages, their bytes only when they come: not all that wait may go on at once."""
    shared = Brake(RateLimit(0, 100_000, 1.0, 0.0), RATES[0], 0.05, time)
    peers = [CreditPause(Pace((shared,), time), f"peer {number}") for number in range(40)]
    granted: list[float] = []
    coming: list[CreditPause] = []  # who got credit and will send a message of 10 kB
    shared.limit.spend(0, 399_989, time.now)

    def ask(peer: CreditPause) -> None:
        if peer.grant(10, 9_973.0, lambda: ask(peer), 0):
            granted.append(time.now)
            coming.append(peer)

    for peer in peers:
        ask(peer)
    for _ in range(200):
        time.pass_to(time.now + 0.05)
        while coming:
            coming.pop().spend(0, 9_973)
    assert len(granted) == len(peers)
    assert max(Counter(granted).values()) <= 11, "a burst, and one message"
    passes_at_most([(when, 9_973) for when in granted], 100_000, 100_000)


def test_credit_is_not_saved_up_by_who_sends_little(time: Time) -> None:
    limit = Brake(RateLimit(100, 5000, 1.0, 0.0), RATES[0], 0.05, time)
    peer = CreditPause(Pace((limit,), time), "peer")
    held = 0
    for _ in range(50):
        held += peer.grant(1000, 100.0, pytest.fail, held)
        time.pass_to(time.now + 1.0)
    assert held == 50  # bytes of a burst; it has used none


def test_a_bug_in_one_connection_lets_the_others_go_on(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    shared = brake(10, 1.0, time)
    sent: list[tuple[float, int]] = []
    broken = SendingPause(Pace((shared,), time), "broken", lambda: 1 // 0)
    shared.limit.spend(20, 0, 0.0)
    assert broken.must_wait()
    other = Receiver((shared,), time, [1], sent)
    other.send()
    time.pass_to(5.0)
    assert other.total > 20
