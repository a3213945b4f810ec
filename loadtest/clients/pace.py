"""Limits a sender by a window of unacknowledged messages, and by a rate if there is one; or paces a loop by a rate."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable


class Pace:
    """Computes how many messages may be sent now; none before `start`.

    Args:
        window: the most unacknowledged messages.
        rate: messages per second, or None for as fast as the window allows.
        clock: seconds, from any origin.
        phase: when the first message is due, in messages: 1 means immediately, 0.5 after half an interval. Senders
            with different phases form a steady stream instead of bursts.
    """

    def __init__(
        self,
        window: int,
        rate: float | None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        phase: float = 1.0,
    ) -> None:
        self.window = window
        self.rate = rate
        self._clock = clock
        self._phase = phase
        self._started: float | None = None
        self._first = 0

    def start(self, sent: int = 0, at: float | None = None) -> None:
        """Start sending with message `sent`, and the clock of the rate now or at `at`."""
        self._first = sent
        self._started = self._clock() if at is None else at

    def now(self) -> float:
        """Return the present time of its clock."""
        return self._clock()

    def due(self, index: int) -> float:
        """Return when message `index` is due by the rate, even if that is long ago; without a rate, now."""
        if self.rate is None or self._started is None:
            return self._clock()
        return self._started + (index - self._first + 1 - self._phase) / self.rate

    def capacity(self, sent: int, answered: int) -> int:
        """Return how many messages may be sent now."""
        if self._started is None:
            return 0
        room = self.window - (sent - answered)
        if self.rate is not None:
            due = math.floor((self._clock() - self._started) * self.rate + self._phase)
            room = min(room, self._first + due - sent)
        return max(0, room)


async def at_rate(rate: float, tick_s: float = 0.01) -> AsyncIterator[int]:
    """Yield 1, 2, 3 and so on for ever, `rate` of them a second, and those that are late at once."""
    number, began = 0, time.monotonic()
    while True:
        for _ in range(int((time.monotonic() - began) * rate) - number):
            number += 1
            yield number
        await asyncio.sleep(tick_s)
