"""Deliveries of a group that were given back and wait for their next attempt."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from gateway.kafka.groups.assignment import Delivery


class RedeliveryQueue:
    """A heap of deliveries by the time of their next attempt, with one timer."""

    def __init__(
        self, backoff_s: Callable[[int], float], retry: Callable[[Delivery], None], changed: Callable[[], None]
    ) -> None:
        """`backoff_s` returns the delay after a number of returns.

        `retry` is called for each delivery that is due, then `changed` once.
        """
        self._backoff_s = backoff_s
        self._retry = retry
        self._changed = changed
        self._waiting: list[tuple[float, int, Delivery]] = []
        self._last_delay = (0.0, -1, 0.0)  # the last jittered delay: its time, number of returns, and length
        self._order = itertools.count(1)
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0  # uvloop's handles do not expose it

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivery: Delivery) -> None:
        """Keep a delivery for its back-off, which grows with each return."""
        loop = asyncio.get_running_loop()
        # uvloop's clock stands still within an iteration: records that come back together keep their order.
        now = loop.time()
        if self._last_delay[:2] != (now, delivery.returns):
            self._last_delay = (now, delivery.returns, self._backoff_s(delivery.returns))
        delivery.returns += 1
        heapq.heappush(self._waiting, (now + self._last_delay[2], next(self._order), delivery))
        self._set_timer(loop)

    def drop_revoked(self) -> None:
        """Forget the deliveries of partitions that are no longer assigned here."""
        self._waiting = [entry for entry in self._waiting if entry[2].assigned.ours]
        heapq.heapify(self._waiting)

    def close(self) -> None:
        """Forget all deliveries and stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._waiting[0][0]
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = loop.call_at(due, self._retry_due)

    def _retry_due(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting and self._waiting[0][0] <= loop.time():
            self._retry(heapq.heappop(self._waiting)[2])
        if self._waiting:
            self._set_timer(loop)
        self._changed()
