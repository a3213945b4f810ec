"""Answers to failures are delayed longer each time; addresses are forgotten after a pause, or after many others.

And the address that a failure is counted for.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.security import throttle
from gateway.security.throttle import DELAY_LIMIT_S, FORGET_S, Throttle, address_of

BASE_S, TOOK_S, ADDRESSES = 0.5, 0.25, 3


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("192.0.2.1:1883", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6:50000", "2001:db8:1:2::/64"),
        ("[2001:db8::1]:50000", "2001:db8::/64"),
        ("::ffff:192.0.2.1:50000", "192.0.2.1"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_failures_are_counted_for_the_host(peer: str, address: str) -> None:
    assert address_of(peer) == address


class Attempts(RuleBasedStateMachine):
    """Failing addresses, passing time, and answers."""

    def __init__(self) -> None:
        super().__init__()
        with mock.patch.object(throttle, "ADDRESSES", ADDRESSES):
            self.throttle = Throttle(BASE_S, clock=lambda: self.now, sleep=self.sleep)
        self.now = 100.0
        self.slept = 0.0
        # In the order of the last failure: how many in a row, when, when the answers are due.
        self.failed: dict[str, tuple[int, float, list[float]]] = {}
        self.answers: list[Coroutine[Any, Any, None]] = []

    @types.coroutine
    def sleep(self, seconds: float) -> Generator[None]:
        self.slept = seconds
        yield

    @rule(address=st.sampled_from("abcde"))
    def fail(self, address: str) -> None:
        count, last, due = self.failed.pop(address, (0, self.now, []))
        count = 0 if self.now - last > FORGET_S else count
        answer = self.throttle.wait_refused(address, self.now - TOOK_S)
        answer.send(None)
        assert self.slept == min(DELAY_LIMIT_S, BASE_S * 2**count) - TOOK_S
        self.answers.append(answer)
        self.failed[address] = (count + 1, self.now, [*due, self.now + self.slept])
        while len(self.failed) > ADDRESSES:
            del self.failed[next(iter(self.failed))]

    @rule(cancelled=st.booleans())
    def answer(self, cancelled: bool) -> None:
        """A client that does not wait for its answer counts until it was due, too."""
        for waiting in self.answers[-1:]:
            if cancelled:
                waiting.close()
            else:
                with pytest.raises(StopIteration):
                    waiting.send(None)
            self.answers.pop()

    @rule(seconds=st.sampled_from([0.1, 30.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def remembers_those_who_failed_last(self) -> None:
        assert len(self.throttle) == len(self.failed)
        for address in "abcde":
            due = self.failed.get(address, (0, 0.0, []))[2]
            assert self.throttle.waiting(address) == sum(time > self.now for time in due)


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
