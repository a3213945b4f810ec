"""A clock with timers for the limits' waiters, which a test advances."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gateway.limits import brakes as brakes_module


class Time:
    """A clock with timers like an event loop's, which the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Any] = []
        self._number = itertools.count()

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        assert delay >= 0
        timer = Timer(call)
        heapq.heappush(self._timers, (self.now + delay, next(self._number), timer))
        return timer

    def pass_to(self, end: float) -> None:
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            timer.fire()
        self.now = end

    @property
    def waits(self) -> bool:
        return any(not timer.cancelled for *_, timer in self._timers)


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._call()


def limits_at(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(brakes_module.asyncio, "get_running_loop", lambda: time)
    return time
