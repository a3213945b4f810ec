"""How many records a micro-batch may have, by how fast those before it were processed. No I/O.

A job that falls behind takes as much as it may in each batch. Where it is slow, such a batch lasts for minutes: results
come in lumps, a stop waits, and a kill repeats all of it. So a batch is given what is processed in a few seconds.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SHORTEST_S: Final = 10.0
"""No batch needs to be shorter than this, however short its interval is: each costs something, whatever is in it."""
TOO_LONG: Final = 1.5
"""Times what is wanted."""
TOO_SHORT: Final = 0.5
TOGETHER: Final = 2
"""So many batches in a row must say the same: the first after a start compiles, and one may have been unlucky."""
GROWTH: Final = 4
WORTH: Final = 0.7
"""Of the rate of larger batches smaller ones must reach this; else what each costs outweighs the rest."""
LEAST: Final = 100


class BatchSize:
    """Follows the batches of a query.

    Args:
        most: records that a batch may have in any case.
        wanted_s: how long it is to take at most, seconds.

    Attributes:
        now: records that a batch may have now.
    """

    def __init__(self, most: int, wanted_s: float) -> None:
        self.now = most
        self._most = most
        self._least = min(LEAST, most)
        self._wanted_s = wanted_s
        self._recent: deque[tuple[int, float]] = deque(maxlen=TOGETHER)
        self._larger: tuple[int, float] | None = None  # before the newest change, which made it smaller; and its rate

    def finished(self, rows: int, seconds: float) -> bool:
        """A batch is done, of so many records in so many seconds; whether `now` is another for the next."""
        if not 0.9 * self.now <= rows <= 1.1 * self.now:
            self._recent.clear()  # it has taken all that was there, or was begun when more was allowed
            return False
        self._recent.append((rows, max(seconds, 0.001)))
        if len(self._recent) < TOGETHER:
            return False
        before, self.now = self.now, self._fitting()
        if self.now != before:
            self._recent.clear()
        return self.now != before

    def _fitting(self) -> int:
        times = [took for _, took in self._recent]
        rate = sum(rows for rows, _ in self._recent) / sum(times)
        larger, self._larger = self._larger, None
        if larger is not None and rate < WORTH * larger[1]:
            self._least = larger[0]
            return self._least
        wanted = int(rate * self._wanted_s)
        if min(times) > TOO_LONG * self._wanted_s:
            self._larger = self.now, rate
            return min(self.now, max(self._least, wanted))
        if max(times) < TOO_SHORT * self._wanted_s:
            return max(self.now, min(self._most, GROWTH * self.now, wanted))
        return self.now
