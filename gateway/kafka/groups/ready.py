"""Deliveries of a group that are ready for the next member of their pool, and how many of them may wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.kafka.groups.assignment import Delivery, Pool

WAITING_RECORDS: Final = 2000
WAITING_BYTES: Final = 8 * 1024 * 1024
"""What may wait for pools without capacity while others go on. Beyond, reading stops for all: Kafka's log holds it."""


class ReadyDeliveries:
    """The ready deliveries of all pools of one group, each in its pool's queue.

    Attributes:
        records: how many.
        bytes: their values.
    """

    def __init__(self) -> None:
        self._busy: dict[Pool, None] = {}
        self.records = self.bytes = 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Those with ready deliveries, as of now."""
        return tuple(self._busy)

    @property
    def has_space(self) -> bool:
        """Whether more may wait."""
        return self.records < WAITING_RECORDS and self.bytes < WAITING_BYTES

    def add(self, delivery: Delivery, *, first: bool = False) -> None:
        """To the end of its pool's queue, or to its beginning."""
        pool = delivery.pool
        if first:
            pool.ready.appendleft(delivery)
        else:
            pool.ready.append(delivery)
        self._busy[pool] = None
        self.records += 1
        self.bytes += len(delivery.record.value or b"")

    def add_all(self, pool: Pool, deliveries: Sequence[Delivery]) -> None:
        """To the end of one pool's queue; at least one."""
        pool.ready.extend(deliveries)
        self._busy[pool] = None
        self.records += len(deliveries)
        self.bytes += sum([len(delivery.record.value or b"") for delivery in deliveries])

    def take(self, pool: Pool) -> Delivery:
        """The first of a pool that has some."""
        delivery = pool.ready.popleft()
        if not pool.ready:
            del self._busy[pool]
        self.records -= 1
        self.bytes -= len(delivery.record.value or b"")
        return delivery
