"""Rate limits at run time: counts what a client sends and receives, and makes clients in debt wait in turn.

Messages that were sent or read cannot be undone: they are charged, and a client in debt waits (ADR 0095). Waiters at
the same limit continue in the order of their arrival, as many as the limit covers; a waiter that is in debt again
queues behind the others. No waiter has its own timer (ADR 0095).
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from flowcontrol.bucket import RateLimit
from gateway.runtime.failures import failures

AHEAD_S: Final = 0.05
"""A waiter continues when this many seconds' worth of the rate is available, not after each message."""
OUT_AHEAD_S: Final = 0.2
"""The same for sending: a receiver that continues reads the log from its position, which costs more than a message."""


class Waiter(Protocol):
    """A connection or task that waits at a brake."""

    mean: float  # average bytes of a message

    def resume(self, brake: Brake) -> tuple[int, int]:
        """Continue: it is the waiter's turn. Returns the messages and bytes that it will probably spend now."""


LEAST_WAIT_S: Final = 0.001  # a shorter wait may round to none, and then to another


class Brake:
    """One direction of one limit, and the waiters in it."""

    __slots__ = ("_ahead_s", "_clock", "_timer", "_waiting", "disconnects", "limit", "reason")

    def __init__(
        self, limit: RateLimit, reason: str, ahead_s: float, clock: Callable[[], float], *, disconnects: bool = False
    ) -> None:
        """`reason` is one of `gateway.views.pauses`; `clock` returns monotonic seconds."""
        self.limit = limit
        self.reason = reason
        self.disconnects = disconnects  # an MQTT client in debt is disconnected
        self._ahead_s = ahead_s
        self._clock = clock
        self._waiting: collections.OrderedDict[Waiter, None] = collections.OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_waiters(self) -> bool:
        """Whether there are waiters, so that a new one queues behind them."""
        return bool(self._waiting)

    def wait(self, waiter: Waiter) -> None:
        """Call the waiter's `resume` when it is its turn. No effect while it is already waiting."""
        if waiter not in self._waiting:
            self._waiting[waiter] = None
            if self._timer is None:
                self._arm()

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        self._waiting.pop(waiter, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        mean = next(iter(self._waiting)).mean
        wait_s = self.limit.wait_s(self._clock(), self._ahead_s, mean)
        wait_s = max(wait_s, LEAST_WAIT_S) if wait_s else self._ahead_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._turn)

    def _turn(self) -> None:
        """Let the first waiters continue, as many as the limit covers given the expected spending of each."""
        self._timer = None
        now = self._clock()
        messages = size = 0
        for _ in range(len(self._waiting)):  # a waiter that waits again gets another turn later
            if not self._waiting or not self.limit.covers(messages, size, now):
                break
            waiter, _ = self._waiting.popitem(last=False)
            try:
                more, bytes_more = waiter.resume(self)
            except Exception as error:  # a bug in one connection must not stop the others
                failures.report("connection", error, self.reason)
                continue
            messages += more
            size += bytes_more
        if self._waiting and self._timer is None:
            self._arm()


class Pace:
    """One direction of one connection: all limits that apply to it."""

    __slots__ = ("_clock", "brakes")

    def __init__(self, brakes: tuple[Brake, ...], clock: Callable[[], float]) -> None:
        """`brakes` has at least one element."""
        self.brakes = brakes
        self._clock = clock

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total."""
        now = self._clock()
        for brake in self.brakes:
            brake.limit.spend(messages, size, now)

    def give_back(self, messages: int) -> None:
        """Credit messages that were charged but will not come."""
        now = self._clock()
        for brake in self.brakes:
            brake.limit.give_back(messages, now)

    def burst(self, mean: float) -> int:
        """Return how many messages of about `mean` bytes make a burst, at least one."""
        bursts = (
            min(most, largest / max(mean, 1.0)) for most, largest in (brake.limit.bursts for brake in self.brakes)
        )
        return max(1, int(min(bursts)))

    def page(self, messages: int, size: int) -> tuple[int, int]:
        """Limit the messages and bytes of one response to half of a burst.

        The wait after it is then shorter than a burst lasts, so no part of the rate is lost when a client waits in
        whole seconds.
        """
        for brake in self.brakes:
            most, largest = brake.limit.bursts
            messages, size = int(min(messages, most / 2)), int(min(size, largest / 2))
        return max(1, messages), size

    def owed(self) -> tuple[float, Brake]:
        """Return the longest remaining debt in seconds and its brake; 0 means no debt."""
        now = self._clock()
        waits = [brake.limit.wait_s(now) for brake in self.brakes]
        longest = max(waits)
        return longest, self.brakes[waits.index(longest)]

    def owing(self) -> Iterator[Brake]:
        """Return the brakes with a debt."""
        now = self._clock()
        return (brake for brake in self.brakes if brake.limit.wait_s(now) > 0)

    def grant(self, most: int, mean: float, turns: tuple[Brake, ...]) -> int | Brake:
        """Grant up to `most` messages of about `mean` bytes and charge them in advance.

        Their bytes are not charged: `spend` these. At the brakes in `turns` it is the caller's turn, so other waiters
        there do not count. Returns a number above 0, or else the brake that is in debt or has other waiters.
        """
        now = self._clock()
        for brake in self.brakes:
            if brake.has_waiters and brake not in turns:
                return brake
            most = brake.limit.affordable(most, mean, now)
            if not most:
                return brake
        self.spend(most, 0)
        return most
