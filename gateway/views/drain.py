"""Draining: a stopping gateway disconnects its clients at a limited rate and in random order (ADR 0074)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Final, Protocol

import msgspec
import structlog

from gateway.runtime.failures import failures
from gateway.settings.config import DrainConfig
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

TICK_S: Final = 0.05
LEAD_S: Final = 5.0  # default lead


class Departing(Protocol):
    """A connection to be drained: first prepared, then closed as soon as its messages are answered."""

    @property
    def left(self) -> bool:
        """Whether the connection is closed or was told to close."""
        ...

    def prepare_to_leave(self) -> bool:
        """Stop accepting messages from the client; those already received are still answered.

        Returns:
            Whether it closes together with an answer, so that `leave` need not be called.
        """
        ...

    @property
    def may_leave(self) -> bool:
        """Whether Kafka has answered all of its messages; polled after `prepare_to_leave`."""
        ...

    def leave(self) -> None:
        """Close the connection with the protocol's own message."""


class Drainable(Protocol):
    """A protocol's server that can be drained."""

    def departing(self) -> Iterable[Departing]:
        """Return the current connections."""
        ...

    def stop_accepting(self) -> None:
        """Accept no more connections; refuse those that have not logged in, with the protocol's own message."""


class DrainStatistics(msgspec.Struct, frozen=True):
    """Progress of draining."""

    connections: Annotated[int, gauge("connections that a draining gateway has still to close")]
    sent_away_total: Annotated[int, counter("connections closed by draining")]


class Drain:
    """Drains all connections; at the end only those remain whose messages Kafka does not answer."""

    def __init__(
        self,
        config: DrainConfig,
        listeners: Callable[[], Iterable[Drainable]],  # called when draining starts
        *,
        settle_s: float,  # how long a prepared connection delays others
        lead_s: float = LEAD_S,  # default
    ) -> None:
        self._config = config
        self._listeners = listeners
        self._settle_s = settle_s
        self._lead_s = config.lead_s if config.lead_s is not None else lead_s
        self._order: list[Departing] = []  # connections not prepared yet; the next one is last
        self._waiting: dict[Departing, float] = {}  # prepared connections, with the time of preparation
        self._counted: set[Departing] = set()  # those of `_waiting` that are already counted as gone
        self._sent_away = 0

    async def run(self, hurry: asyncio.Event) -> None:
        """Wait for the lead time, then drain all connections. `hurry` ends it immediately."""
        log.info("draining", lead_s=self._lead_s, rate_per_s=self._config.rate_per_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.limit_s):
                if not await _happens(hurry, self._lead_s):
                    await self._send_away(hurry)
        log.info("drained", sent_away=self._sent_away, left=len(self._order) + len(self._waiting))

    async def _send_away(self, hurry: asyncio.Event) -> None:
        listeners = tuple(self._listeners())
        for listener in listeners:
            listener.stop_accepting()
        clock = asyncio.get_running_loop().time
        # Unused rate is kept for at most two ticks, so that a delayed process makes no burst. With these two ticks no
        # second exceeds `rate_per_s` + 1.
        rate = self._config.rate_per_s / (1 + 2 * TICK_S)
        share, before = 0.0, clock()
        while True:
            now = clock()
            share, before = min(share + rate * (now - before), 1 + 2 * rate * TICK_S), now
            if not self._order:
                self._order = [
                    connection
                    for each in listeners
                    for connection in each.departing()
                    if not (connection.left or connection in self._waiting)
                ]
                random.shuffle(self._order)
            gone = self._close_answered(int(share))
            gone += self._prepare_next(int(share) - gone, now)
            share -= gone
            self._sent_away += gone
            if not self._order and all(now - since > self._settle_s for since in self._waiting.values()):
                return
            if await _happens(hurry, TICK_S):
                return

    def _close_answered(self, most: int) -> int:
        """Close prepared connections whose messages Kafka has answered; returns how many."""
        gone = 0
        for connection in list(self._waiting):
            is_counted = connection in self._counted
            if connection.left or ((is_counted or gone < most) and connection.may_leave):
                del self._waiting[connection]
                self._counted.discard(connection)
                gone += self._leave(connection) and not is_counted
        return gone

    def _prepare_next(self, most: int, now: float) -> int:
        """Prepare the next connections unless too many are pending; returns how many count as gone."""
        called = gone = 0
        recent = sum(1 for since in self._waiting.values() if now - since <= self._settle_s)
        while self._order and called < most and recent <= self._config.rate_per_s:
            connection = self._order.pop()
            if connection.left:
                continue
            called += 1
            try:
                by_itself = connection.prepare_to_leave()
                if connection.may_leave:
                    self._leave(connection)
                    gone += 1
                    continue
                self._waiting[connection] = now
                recent += 1
                if by_itself:
                    self._counted.add(connection)
                    gone += 1
            except Exception as error:  # a bug must affect only one connection
                failures.report("drain", error)
        return gone

    def _leave(self, connection: Departing) -> bool:
        if connection.left:
            return False
        try:
            connection.leave()
        except Exception as error:
            failures.report("drain", error)
        return True

    def statistics(self) -> DrainStatistics:
        """Return the current counts."""
        return DrainStatistics(connections=len(self._order) + len(self._waiting), sent_away_total=self._sent_away)


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    """Return whether the event is set within `within_s` seconds."""
    try:
        await asyncio.wait_for(event.wait(), within_s)
    except TimeoutError:
        return False
    return True
