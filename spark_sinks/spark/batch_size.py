"""Adapts the size of micro-batches to the query's speed. No I/O.

A job that falls behind would otherwise read as much as allowed in each batch. If it is slow, such a batch lasts for
minutes: results come in bursts, a stop waits, and a kill repeats it all. So a batch is limited to what the query
processes in a few seconds.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SHORTEST_S: Final = 10.0
"""No batch needs to be shorter than this, however short its interval: each batch has a fixed cost."""
TOO_LONG: Final = 1.5
"""A batch is too long above this multiple of the wanted duration."""
TOO_SHORT: Final = 0.5
TOGETHER: Final = 2
"""Batches in a row that must agree: the first after a start compiles code, and a single one may be an outlier."""
GROWTH: Final = 4
WORTH: Final = 0.7
"""Smaller batches must reach this share of the larger ones' rate; else their fixed cost outweighs the gain."""
LEAST: Final = 100


class BatchSize:
    """Sets the size of a query's next batches from the duration of its last ones.

    Args:
        most: the most records that a batch may ever have.
        wanted_s: the longest duration wanted, seconds.

    Attributes:
        now: the most records of the next batch.
    """

    def __init__(self, most: int, wanted_s: float) -> None:
        self.now = most
        self._most = most
        self._least = min(LEAST, most)
        self._wanted_s = wanted_s
        self._recent: deque[tuple[int, float]] = deque(maxlen=TOGETHER)
        self._larger: tuple[int, float] | None = None  # size and rate before the last reduction

    def finished(self, rows: int, seconds: float) -> bool:
        """Count a batch of `rows` records that took `seconds`; return whether `now` changed."""
        if not 0.9 * self.now <= rows <= 1.1 * self.now:
            self._recent.clear()  # it read all there was, or was started with another size
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
