"""The back-off of deliveries that failed, and of members that give the same records back again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.kafka.groups.delivery.assignment import Delivery, GivenBack, Member

AT_ONCE: Final = 10
"""How often the same record may be given back without a pause by members that settle no other."""


class Rests(msgspec.Struct, eq=False):
    """The pauses of members that give back a record that came back more than `AT_ONCE` times, and settle no other.

    Other members get the record immediately. A record that is given back without a pause keeps its place.
    """

    _backoff_s: Callable[[int], float]  # returns the length of a member's pause number 0, 1, ... in a row
    _wake: Callable[[Member], None]  # called after a pause
    _timers: dict[Member, asyncio.TimerHandle] = {}

    def count(self, member: Member, delivery: Delivery) -> None:
        """Count that a member has given a delivery back; if too often, it gets no records for a while."""
        last = delivery.given_back
        has_progressed = last is not None and last.member is member and last.settled != member.settled
        count = 1 if last is None or has_progressed else last.count + 1
        delivery.given_back = GivenBack(member, member.settled, count)
        if count > AT_ONCE and not member.resting:
            member.resting = True
            member.fill()
            pause = self._backoff_s(count - AT_ONCE - 1)
            self._timers[member] = asyncio.get_running_loop().call_later(pause, self._end, member)

    def forget(self, member: Member) -> None:
        """Forget a member that has left."""
        timer = self._timers.pop(member, None)
        if timer is not None:
            timer.cancel()

    def _end(self, member: Member) -> None:
        del self._timers[member]
        member.resting = False
        self._wake(member)


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
