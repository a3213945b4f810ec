"""Leaving without a storm: a gateway that stops sends its clients away at a rate, in random order (ADR 0074)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Final, Protocol

import msgspec
import structlog

from gateway.config import DrainConfig
from gateway.failures import failures
from gateway.statistics import counter, gauge

log = structlog.get_logger(__name__)

TICK_S: Final = 0.05
LEAD_S: Final = 5.0  # where no lead is given


class Departing(Protocol):
    """A connection that is to leave: told that its turn has come, then, as soon as it may, with its protocol's word."""

    @property
    def left(self) -> bool:
        """Whether it is gone, or has been told that it goes."""
        ...

    def prepare_to_leave(self) -> bool:
        """Its turn: nothing new is taken from it; what was taken is answered.

        Returns:
            Whether it leaves with an answer, without being told to `leave`.
        """
        ...

    @property
    def may_leave(self) -> bool:
        """Whether Kafka has answered for all that it had sent; asked again and again since its turn."""
        ...

    def leave(self) -> None:
        """Close it in its protocol's way."""


class Leavable(Protocol):
    """A listener that is being left."""

    def departing(self) -> Iterable[Departing]:
        """All that are connected to it now."""
        ...

    def close_doors(self) -> None:
        """Accept nobody any more; who was accepted and has not logged in is refused by the protocol's word."""


class DrainStatistics(msgspec.Struct, frozen=True):
    """How far a gateway that stops has come."""

    connections: Annotated[int, gauge("connections that are still to leave a gateway that stops")]
    sent_away_total: Annotated[int, counter("connections that were told to leave")]


class Drain:
    """The end of serving, up to the moment in which only those are left whom Kafka does not answer."""

    def __init__(
        self,
        config: DrainConfig,
        listeners: Callable[[], Iterable[Leavable]],  # asked when it begins
        *,
        settle_s: float,  # how long a connection's turn waits for Kafka before others are waited for
        lead_s: float = LEAD_S,  # where the configuration has none
    ) -> None:
        self._config = config
        self._listeners = listeners
        self._settle_s = settle_s
        self._lead_s = config.lead_s if config.lead_s is not None else lead_s
        self._order: list[Departing] = []  # whose turn is still to come, the next one last
        self._waiting: dict[Departing, float] = {}  # since their turn
        self._counted: set[Departing] = set()  # of these, who counts as gone already
        self._sent_away = 0

    async def run(self, hurry: asyncio.Event) -> None:
        """Wait for the lead, then send everybody away; `hurry` ends it at once."""
        log.info("draining", lead_s=self._lead_s, rate_per_s=self._config.rate_per_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.limit_s):
                if not await _happens(hurry, self._lead_s):
                    await self._send_away(hurry)
        log.info("drained", sent_away=self._sent_away, left=len(self._order) + len(self._waiting))

    async def _send_away(self, hurry: asyncio.Event) -> None:
        listeners = tuple(self._listeners())
        for listener in listeners:
            listener.close_doors()
        clock = asyncio.get_running_loop().time
        # What was not spent is lost but for two ticks: a process that was late makes no burst. With these two ticks no
        # second has more than `rate_per_s`, and one.
        rate = self._config.rate_per_s / (1 + 2 * TICK_S)
        share, before = 0.0, clock()
        while True:
            now = clock()
            share, before = min(share + rate * (now - before), 1 + 2 * rate * TICK_S), now
            if not self._order:
                self._order = [
                    one for each in listeners for one in each.departing() if not (one.left or one in self._waiting)
                ]
                random.shuffle(self._order)
            gone = self._let_go(int(share))
            gone += self._call(int(share) - gone, now)
            share -= gone
            self._sent_away += gone
            if not self._order and all(now - since > self._settle_s for since in self._waiting.values()):
                return
            if await _happens(hurry, TICK_S):
                return

    def _let_go(self, most: int) -> int:
        """Let those leave whose turn was before, and for whom Kafka has answered by now; how many."""
        gone = 0
        for one in list(self._waiting):
            is_counted = one in self._counted
            if one.left or ((is_counted or gone < most) and one.may_leave):
                del self._waiting[one]
                self._counted.discard(one)
                gone += self._leave(one) and not is_counted
        return gone

    def _call(self, most: int, now: float) -> int:
        """The next ones' turn; how many count as gone. Not before those before them have left, or were waited for."""
        called = gone = 0
        recent = sum(1 for since in self._waiting.values() if now - since <= self._settle_s)
        while self._order and called < most and recent <= self._config.rate_per_s:
            one = self._order.pop()
            if one.left:
                continue
            called += 1
            try:
                by_itself = one.prepare_to_leave()
                if one.may_leave:
                    self._leave(one)
                    gone += 1
                    continue
                self._waiting[one] = now
                recent += 1
                if by_itself:
                    self._counted.add(one)
                    gone += 1
            except Exception as error:  # our bug, with one connection
                failures.tell("drain", error)
        return gone

    def _leave(self, one: Departing) -> bool:
        if one.left:
            return False
        try:
            one.leave()
        except Exception as error:
            failures.tell("drain", error)
        return True

    def statistics(self) -> DrainStatistics:
        """Counts for the metrics."""
        return DrainStatistics(connections=len(self._order) + len(self._waiting), sent_away_total=self._sent_away)


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    """Whether it happens within so many seconds."""
    try:
        await asyncio.wait_for(event.wait(), within_s)
    except TimeoutError:
        return False
    return True
