"""When a sender may send: a window of unanswered messages, and a rate if one is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Pace:
    """How many messages may go out now; none before `start`.

    Args:
        window: messages unanswered at most.
        rate: messages a second, or None for as fast as the window allows.
        clock: seconds, from anywhere on.
        phase: of the first message, in messages: 1 is due at once, 0.5 after half the time between two. Many senders
            with different phases are a stream and no bursts.
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
        """Sending begins with message `sent`, and the clock of the rate: now, or `at`."""
        self._first = sent
        self._started = self._clock() if at is None else at

    def now(self) -> float:
        """By its clock."""
        return self._clock()

    def due(self, index: int) -> float:
        """When message `index` is to be sent: as planned by the rate, however late that is done; else now."""
        if self.rate is None or self._started is None:
            return self._clock()
        return self._started + (index - self._first + 1 - self._phase) / self.rate

    def capacity(self, sent: int, answered: int) -> int:
        """How many of the next messages may be sent."""
        if self._started is None:
            return 0
        room = self.window - (sent - answered)
        if self.rate is not None:
            due = math.floor((self._clock() - self._started) * self.rate + self._phase)
            room = min(room, self._first + due - sent)
        return max(0, room)
