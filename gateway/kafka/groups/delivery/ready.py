"""Deliveries of a group that are ready for the next member of their pool, with a limit on how many may wait."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.kafka.groups.delivery.assignment import Delivery, Pool

WAITING_RECORDS: Final = 2000
WAITING_BYTES: Final = 8 * 1024 * 1024
"""The most that may wait for pools without capacity while others go on. Beyond it reading stops for all pools."""


def _place(delivery: Delivery) -> tuple[int, int]:
    return delivery.turn, delivery.record.offset


@dataclass(slots=True, eq=False)
class ReadyDeliveries:
    """The ready deliveries of all pools of one group, each in its pool's queue."""

    _busy: dict[Pool, None] = field(default_factory=dict)
    records: int = 0
    bytes: int = 0  # of their values

    @property
    def pools(self) -> tuple[Pool, ...]:
        """A snapshot of the pools with ready deliveries."""
        return tuple(self._busy)

    @property
    def has_space(self) -> bool:
        """Whether more deliveries may wait."""
        return self.records < WAITING_RECORDS and self.bytes < WAITING_BYTES

    def add(self, delivery: Delivery, *, first: bool = False) -> None:
        """Put a delivery at the end of its pool's queue, or (`first`) at the front."""
        pool = delivery.pool
        if first:
            pool.ready.appendleft(delivery)
        else:
            pool.ready.append(delivery)
        self._busy[pool] = None
        self.records += 1
        self.bytes += len(delivery.record.value or b"")

    def add_all(self, pool: Pool, deliveries: Sequence[Delivery]) -> None:
        """Put one or more deliveries at the end of one pool's queue."""
        pool.ready.extend(deliveries)
        self._busy[pool] = None
        self.records += len(deliveries)
        self.bytes += sum([len(delivery.record.value or b"") for delivery in deliveries])

    def give_back(self, delivery: Delivery) -> None:
        """Put back a delivery that a member had; `sort` finds its place."""
        delivery.pool.returned.append(delivery)
        self._busy[delivery.pool] = None
        self.records += 1
        self.bytes += len(delivery.record.value or b"")

    def sort(self, pool: Pool) -> None:
        """Put deliveries that were given back into their places among the others."""
        returned, pool.returned = pool.returned, []
        ready = [*pool.ready]
        pool.ready.clear()
        pool.ready.extend(heapq.merge(sorted(returned, key=_place), ready, key=_place))

    def take_all(self, pool: Pool, count: int | None = None) -> list[Delivery]:
        """Take all deliveries of a pool, or the first `count` that are in their places; it must have that many."""
        if count is None and pool.returned:
            self.sort(pool)
        ready = pool.ready
        taken = [ready.popleft() for _ in range(len(ready) if count is None else count)]
        if not ready and not pool.returned:
            self._busy.pop(pool, None)
        self.records -= len(taken)
        self.bytes -= sum([len(delivery.record.value or b"") for delivery in taken])
        return taken

    def take(self, pool: Pool) -> Delivery:
        """Take the first delivery of a pool that is in its place; it must have one."""
        delivery = pool.ready.popleft()
        if not pool.ready and not pool.returned:
            del self._busy[pool]
        self.records -= 1
        self.bytes -= len(delivery.record.value or b"")
        return delivery
