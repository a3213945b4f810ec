"""Subscriptions of this gateway's links: the holders of exclusive ones, and those that are being deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LinkSubscriptions:
    """The subscriptions, by the name of their consumer group."""

    def __init__(self) -> None:
        self._holders: dict[str, Callable[[], None]] = {}  # their methods that detach them
        self._deleting: dict[str, set[asyncio.Task[None]]] = {}

    def claim(self, group: str, steal: Callable[[], None]) -> None:
        """Make a link the holder of an exclusive subscription, and detach the former holder by its `steal`."""
        former = self._holders.get(group)
        if former is not None:
            former()
        self._holders[group] = steal

    def release(self, group: str, steal: Callable[[], None]) -> None:
        """Release the subscription if the link with this `steal` holds it."""
        if self._holders.get(group) == steal:
            del self._holders[group]

    def deleting(self, group: str, departure: asyncio.Task[None]) -> None:
        """Note that the task `departure` is deleting a subscription of `group`."""
        departures = self._deleting.setdefault(group, set())
        departures.add(departure)

        def gone(done: asyncio.Task[None]) -> None:
            departures.discard(done)
            if not departures:
                self._deleting.pop(group, None)

        departure.add_done_callback(gone)

    async def wait_deleted(self, group: str) -> None:
        """Wait until no subscription of `group` is being deleted here, so that an attach creates a new one."""
        while departures := self._deleting.get(group):
            await asyncio.wait(departures)
