"""Deliveries of a group that were given back and wait for their next attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gateway.kafka.groups.assignment import Delivery


class RedeliveryQueue(msgspec.Struct, eq=False):
    """Waiting deliveries. Those that came back together, equally often, share a timer and keep their order."""

    _backoff_s: Callable[[int], float]  # returns the delay after a number of returns
    _retry: Callable[[Delivery], None]  # called for each delivery that is due
    _changed: Callable[[], None]  # called once after these
    # by the time and the number of returns; uvloop's clock stands still within an iteration
    _waiting: dict[tuple[float, int], list[Delivery]] = {}
    _timers: dict[tuple[float, int], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, delivery: Delivery) -> None:
        """Keep a delivery for its back-off, which grows with each return."""
        loop = asyncio.get_running_loop()
        key = (loop.time(), delivery.returns)
        if key not in self._waiting:
            self._waiting[key] = []
            self._timers[key] = loop.call_later(self._backoff_s(delivery.returns), self._retry_all, key)
        self._waiting[key].append(delivery)
        delivery.returns += 1

    def drop_revoked(self) -> None:
        """Forget the deliveries of partitions that are no longer assigned here."""
        for key, waiting in self._waiting.items():
            self._waiting[key] = [delivery for delivery in waiting if delivery.assigned.ours]

    def close(self) -> None:
        """Forget all deliveries and stop the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._waiting.clear()

    def _retry_all(self, key: tuple[float, int]) -> None:
        del self._timers[key]
        for delivery in self._waiting.pop(key):
            self._retry(delivery)
        self._changed()
