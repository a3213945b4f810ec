"""When a query may run in real time, and when it has fallen so far behind that it must catch up first. No I/O.

Real time reads every partition as fast as it can, and draws the watermark at its checkpoint from the newest event time
of all. With a backlog, one partition may be minutes ahead by then, and good readings of the others count as late.
Bounded micro-batches keep the partitions abreast. So a query catches up in those until it is a few seconds behind.
"""

from __future__ import annotations

from collections import deque

FEW_RECORDS = 1_000
"""So much is read in an instant: never a reason to catch up, however old it is."""
RELAPSE_S = 300.0
"""Who falls behind again so soon after catching up waits twice as long before the next try..."""
FIRST_HOLD_S = 15.0
"""... beginning with this..."""
LONGEST_HOLD_S = 600.0
"""... and at most this."""


class CatchUpPolicy:
    """Follows how far a query is behind the end of its topics, in records and in seconds.

    Args:
        behind_s: how far behind it may be in real time, by the time of arrival.
    """

    def __init__(self, behind_s: float) -> None:
        self._behind_s = behind_s
        self._ends: deque[tuple[float, int]] = deque()  # when the topics ended where (the sum of all partitions)
        self._hold_s = 0.0
        self._not_before = float("-inf")
        self._fell_at = float("-inf")

    def observe_end(self, now: float, end: int) -> None:
        """The topics end at `end` (sum of offsets) at the time `now`."""
        if self._ends and end <= self._ends[-1][1]:
            self._ends[-1] = now, self._ends[-1][1]
        else:
            self._ends.append((now, end))

    def lag(self, position: int) -> int:
        """Records after `position` (sum of offsets), as far as was seen."""
        return max(0, self._ends[-1][1] - position) if self._ends else 0

    def lag_s(self, now: float, position: int) -> float:
        """How long ago the first record after `position` arrived, at most; 0 at the end. Infinite: before all looks."""
        if not self.lag(position):
            return 0.0
        while len(self._ends) > 1 and self._ends[1][1] <= position:
            self._ends.popleft()
        first, end = self._ends[0]
        return now - first if end <= position else float("inf")

    def may_run_in_real_time(self, now: float, position: int) -> bool:
        """Whether a query that stopped at `position` may go on in real time."""
        if now < self._not_before or not self._ends:
            return False
        return self.lag(position) <= FEW_RECORDS or self.lag_s(now, position) <= self._behind_s

    def must_catch_up(self, now: float, position: int) -> bool:
        """Whether a query in real time, at `position` now, has to catch up. Each True counts as a relapse."""
        if self.lag(position) <= FEW_RECORDS or self.lag_s(now, position) <= self._behind_s:
            return False
        again = now - self._fell_at < RELAPSE_S + self._hold_s
        self._hold_s = min(LONGEST_HOLD_S, max(FIRST_HOLD_S, 2 * self._hold_s)) if again else 0.0
        self._fell_at = now
        self._not_before = now + self._hold_s
        return True
