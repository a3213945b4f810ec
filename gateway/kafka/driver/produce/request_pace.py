"""How long a produce request waits after an answer, so that more records share its cost.

A request costs the gateway and the broker about as much as ten records. A fleet of many quiet senders would fill
requests with a handful each; when they wait for each other, the fleet costs half. Senders that wait for their
acknowledgements gain nothing: after an answer they all send at once, and a wait only delays them. They are recognized
by who sends: the records of a closed loop come from those who have sent just before, those of a fleet from others.

Nothing waits while the processor has time to spare, because then latency is worth more than the cost of a request, nor
at a rate that fills requests anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Set
from typing import Final

ADAPTIVE_S: Final = 0.003
"""Longest wait when none is configured."""
MOST_PER_S: Final = 50_000.0
"""Records per second of one broker above which requests are full without a wait."""
FEWEST: Final = 3.0
"""Records that must come in the time of a wait for it to be worth its timer."""
BUSY, IDLE = 0.25, 0.12
"""Shares of a processor that this thread uses: from the first on requests wait, below the second no longer."""
PERIOD_S: Final = 0.2
"""Time from one decision whether to wait to the next."""
AGAIN_S: Final = 0.02
"""Who sends again within this time is not quiet."""
SAME: Final = 0.5
"""Share of a request's senders that are not quiet, above which waiting does not pay."""


class RequestPace:
    """The wait before the requests to one broker.

    Attributes:
        waits: number of waits so far.
        is_worth_it: whether requests wait now.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        longest_s: float,  # from an answer to the next request; 0: nothing ever waits
        send: Callable[[], None],  # called at the end of a wait
        cpu: Callable[[], float] = time.thread_time,  # processor seconds that this thread has used
    ) -> None:
        self.waits = 0
        self.is_worth_it = False
        self._loop = loop
        self._longest_s = longest_s
        self._send = send
        self._cpu = cpu
        self._answered_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._records = 0  # of this period
        self._senders: list[Set[Hashable]] = []  # of the requests in its last `AGAIN_S`
        self._began = (cpu(), loop.time())  # the period: processor time and time

    def holds(self) -> bool:
        """Whether the next request must wait; `send` is called later, then."""
        if self._timer is not None:
            return True
        if not self.is_worth_it:
            return False
        left = self._answered_at + self._longest_s - self._loop.time()
        if left <= 0:
            return False
        self.waits += 1
        self._timer = self._loop.call_later(left, self._end)
        return True

    def _end(self) -> None:
        self._timer = None
        self._answered_at = float("-inf")  # what is sent now does not wait again
        self._send()

    def written(self, senders: Callable[[], Set[Hashable]]) -> None:
        """Note a request; `senders` returns whose records it has."""
        if self._longest_s and self._loop.time() >= self._began[1] + PERIOD_S - AGAIN_S:
            self._senders.append(senders())

    def answered(self, records: int) -> None:
        """Note the answer to a request with so many records."""
        if not self._longest_s:
            return
        now = self._answered_at = self._loop.time()
        self._records += records
        if now >= self._began[1] + PERIOD_S:
            self._decide(now)

    def _decide(self, now: float) -> None:
        """Decide whether the requests of the next period wait."""
        cpu, (cpu_then, then) = self._cpu(), self._began
        took = now - then
        busy = cpu - cpu_then >= (IDLE if self.is_worth_it else BUSY) * took
        rate = self._records / took
        fits = rate * self._longest_s >= FEWEST and rate <= MOST_PER_S
        self.is_worth_it = busy and fits and self._is_open()
        self._records = 0
        self._senders.clear()
        self._began = cpu, now

    def _is_open(self) -> bool:
        """Whether the last request's senders are others than those before it; not if answers take so long."""
        if len(self._senders) < 2:
            return False
        *before, last = self._senders
        return len(last & frozenset().union(*before)) <= SAME * len(last)
