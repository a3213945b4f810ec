"""Subscriptions of this gateway's links: who has an exclusive one, and which are being ended."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Holder(Protocol):
    """The link that has a subscription."""

    def steal(self) -> None:
        """Another link has attached to the subscription (part 2.6.1): this one is detached."""


class Subscriptions:
    """By the name of their consumer group."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self._ending: dict[str, set[asyncio.Task[None]]] = {}

    def take(self, group: str, link: Holder) -> None:
        """An exclusive subscription is `link`'s from now on; whoever had it loses it."""
        former = self._holders.get(group)
        if former is not None:
            former.steal()
        self._holders[group] = link

    def release(self, group: str, link: Holder) -> None:
        """The link is gone."""
        if self._holders.get(group) is link:
            del self._holders[group]

    def ends(self, group: str, departure: asyncio.Task[None]) -> None:
        """A subscription of `group` is being ended by `departure`."""
        departures = self._ending.setdefault(group, set())
        departures.add(departure)

        def gone(done: asyncio.Task[None]) -> None:
            departures.discard(done)
            if not departures:
                self._ending.pop(group, None)

        departure.add_done_callback(gone)

    async def ended(self, group: str) -> None:
        """Wait until no subscription of `group` is being ended here: whoever attaches then begins a new one."""
        while departures := self._ending.get(group):
            await asyncio.wait(departures)
