"""When a sender may send: a window of unanswered messages, and a rate if one is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """How many messages may go out now; none before `start`.

    Args:
        window: messages unanswered at most.
        rate: messages a second, or None for as fast as the window allows.
        clock: seconds, from anywhere on.
    """

    def __init__(self, window: int, rate: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.window = window
        self.rate = rate
        self._clock = clock
        self._started: float | None = None

    def start(self) -> None:
        """Sending begins, and the clock of the rate."""
        self._started = self._clock()

    def room(self, sent: int, answered: int) -> int:
        """How many of the next messages may be sent."""
        if self._started is None:
            return 0
        room = self.window - (sent - answered)
        if self.rate is not None:
            due = int((self._clock() - self._started) * self.rate) + 1
            room = min(room, due - sent)
        return max(0, room)
