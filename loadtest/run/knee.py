"""The knee: the highest rate that is served well, found by steps. Arithmetic only."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_STEPS: Final = 24
GROWN: Final = 0.05


class Step(NamedTuple):
    """What a step at one rate was like.

    Attributes:
        rate: messages a second that were due.
        p99_ms: of their latency, from when they were due.
        due: messages that were to be sent.
        backlog: of these, not answered at the end of the step.
        failures: refused, unanswered, or lost with their connection.
    """

    rate: float
    p99_ms: float
    due: int
    backlog: int
    failures: int = 0

    def is_good(self, bound_ms: float) -> bool:
        """Whether p99 stays within the bound, and the backlog within what that bound allows (Little's law).

        A step without a message shows nothing. However lax the bound, a backlog of more than a twentieth of a step's
        messages has grown.
        """
        if not self.due or self.failures:
            return False
        allowed = min(self.rate * bound_ms / 1000, self.due * GROWN)
        return self.p99_ms <= bound_ms and self.backlog <= max(1.0, allowed)


class Search:
    """Doubles the rate until a step is bad (halves it while the first ones are), then halves the gap.

    Args:
        start: the first rate.
        close: how near the best good rate and the least bad one are to come, as a share of the bad one.
    """

    def __init__(self, start: float, close: float) -> None:
        self._next: float | None = start
        self._close = close
        self._steps = 0
        self.good: float | None = None
        self.bad: float | None = None

    @property
    def next(self) -> float | None:
        """The rate to try; None when the knee is found, or too many steps were taken."""
        return self._next

    def tell(self, *, good: bool) -> None:
        """How the step at `next` was. What was bad stays bad: a rate above it is not tried."""
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
