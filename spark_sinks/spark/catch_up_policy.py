"""Decides when a query may run in real time, and when it must catch up first. No I/O.

Real time reads every partition as fast as it can, and sets the watermark at its checkpoint from the newest event time
of all. With a backlog, one partition may be minutes ahead by then, and good readings of the others become late.
Bounded micro-batches keep the partitions in step, so a query catches up in them until it is a few seconds behind.
"""

from __future__ import annotations

from collections import deque

FEW_RECORDS = 1_000
"""A lag of this many records is read in an instant, so it is no reason to catch up, however old they are."""
RELAPSE_S = 300.0
"""A query that falls behind again within this time doubles its hold before real time."""
FIRST_HOLD_S = 15.0
"""The first hold."""
LONGEST_HOLD_S = 600.0
"""The longest hold."""


class CatchUpPolicy:
    """Tracks how far a query is behind the end of its topics, in records and in seconds.

    Args:
        behind_s: how far it may be behind in real time, by arrival time.
    """

    def __init__(self, behind_s: float) -> None:
        self._behind_s = behind_s
        self._ends: deque[tuple[float, int]] = deque()  # time, and sum of the topics' end offsets
        self._hold_s = 0.0
        self._not_before = float("-inf")
        self._fell_at = float("-inf")

    def observe_end(self, now: float, end: int) -> None:
        """Record that the topics end at `end` (sum of offsets) at the time `now`."""
        if self._ends and end <= self._ends[-1][1]:
            self._ends[-1] = now, self._ends[-1][1]
        else:
            self._ends.append((now, end))

    def lag(self, position: int) -> int:
        """Return the records after `position` (sum of offsets), as of the last observation."""
        return max(0, self._ends[-1][1] - position) if self._ends else 0

    def lag_s(self, now: float, position: int) -> float:
        """Return the greatest age of the first record after `position`; 0 at the end, infinite if it is not known."""
        if not self.lag(position):
            return 0.0
        while len(self._ends) > 1 and self._ends[1][1] <= position:
            self._ends.popleft()
        first, end = self._ends[0]
        return now - first if end <= position else float("inf")

    def may_run_in_real_time(self, now: float, position: int) -> bool:
        """Whether a query that stopped at `position` may continue in real time."""
        if now < self._not_before or not self._ends:
            return False
        return self._is_near(now, position)

    def must_catch_up(self, now: float, position: int) -> bool:
        """Whether a real-time query at `position` has to catch up. Each True counts as a relapse."""
        if self._is_near(now, position):
            return False
        again = now - self._fell_at < RELAPSE_S + self._hold_s
        self._hold_s = min(LONGEST_HOLD_S, max(FIRST_HOLD_S, 2 * self._hold_s)) if again else 0.0
        self._fell_at = now
        self._not_before = now + self._hold_s
        return True

    def _is_near(self, now: float, position: int) -> bool:
        return self.lag(position) <= FEW_RECORDS or self.lag_s(now, position) <= self._behind_s
