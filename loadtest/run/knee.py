"""Searches the knee: the highest rate that is served well. Arithmetic only."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_STEPS: Final = 24
GROWN: Final = 0.05


class Step(NamedTuple):
    """The result of a step at one rate.

    Attributes:
        rate: messages due per second.
        p99_ms: 99th percentile of latency, from when a message was due.
        due: messages that should have been sent.
        backlog: those not acknowledged at the end of the step.
        failures: refused or unanswered messages, and lost connections.
    """

    rate: float
    p99_ms: float
    due: int
    backlog: int
    failures: int = 0

    def is_good(self, bound_ms: float) -> bool:
        """Whether p99 is within the bound, and the backlog within what the bound allows (Little's law).

        A step without messages proves nothing. However high the bound, a backlog above a twentieth of the messages is
        growing.
        """
        if not self.due or self.failures:
            return False
        allowed = min(self.rate * bound_ms / 1000, self.due * GROWN)
        return self.p99_ms <= bound_ms and self.backlog <= max(1.0, allowed)


class Search:
    """Doubles the rate until a step is bad (or halves it until one is good), then bisects.

    Args:
        start: the first rate.
        close: when to stop: the gap between the best good and the lowest bad rate, as a share of the bad one.
    """

    def __init__(self, start: float, close: float) -> None:
        self._next: float | None = start
        self._close = close
        self._steps = 0
        self.good: float | None = None
        self.bad: float | None = None

    @property
    def next(self) -> float | None:
        """The rate to try; None if the knee is found, or after too many steps."""
        return self._next

    def report(self, *, good: bool) -> None:
        """Report the step at `next`. A rate above a bad one is never tried."""
        rate = self._next
        assert rate is not None, "the search is over"
        self._steps += 1
        if good:
            self.good = rate
        else:
            self.bad = rate
        if self.bad is None:
            self._next = rate * 2
        elif self.good is None:
            self._next = rate / 2 if rate > 1 else None
        elif self.bad - self.good <= self._close * self.bad:
            self._next = None
        else:
            self._next = (self.good + self.bad) / 2
        if self._steps >= MOST_STEPS:
            self._next = None
