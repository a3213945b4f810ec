"""Spreads long work over several turns of the event loop, so that other clients are served in between.

Ten thousand detached links, expired sessions or subscribers of one message are cheap one by one; all in one turn would
delay every other client. ADR 0030.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final, TypeVar

import structlog

log = structlog.get_logger(__name__)

Item = TypeVar("Item")

SLICE_S: Final = 0.01
"""How long one slice of work may occupy the loop. A turn has few slices, and Kafka's answers, which every client waits
for, come in between."""

BETWEEN: Final = 64  # items between two checks of the clock
AT_ONCE: Final = 64  # tasks resumed per turn; those that exceed the turn's share wait again


class TurnShare:
    """Limits the time per turn of the loop of one kind of work that many tasks do: `await share.rest()` in between.

    One answer from Kafka may resume hundreds of tasks in the same turn. Each is short; all together are not.
    """

    __slots__ = ("_until", "_waiting")

    def __init__(self) -> None:
        self._until: float | None = None  # None: not used in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def rest(self) -> None:
        """Return immediately while this turn's share is not used up, otherwise in a later turn."""
        while not self._is_left():
            later: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(later)
            await later

    def _is_left(self) -> bool:
        if self._until is None:
            self._until = time.perf_counter() + SLICE_S
            asyncio.get_running_loop().call_soon(self._renew)
            return True
        return time.perf_counter() < self._until

    def _renew(self) -> None:
        """Resume up to `AT_ONCE` waiting tasks in the new turn."""
        self._until = None
        for _ in range(min(AT_ONCE, len(self._waiting))):
            later = self._waiting.popleft()
            if not later.done():  # otherwise cancelled
                later.set_result(None)
        if self._waiting:
            self._is_left()


class Slices:
    """Slices one coroutine's long loop: `await slices.rest()` between its steps."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def rest(self) -> None:
        """Yield to the event loop if the current slice is used up."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S


async def sliced(parts: Iterable[Callable[[], Iterable[Item]]]) -> AsyncIterator[Item]:
    """Yield the items of several parts, each read when it is its turn, in slices over several turns of the loop."""
    slices = Slices()
    for part in parts:
        for number, item in enumerate(part()):
            if not number % BETWEEN:
                await slices.rest()
            yield item


def in_turns(steps: Iterator[object]) -> None:
    """Run the steps of an iterator: one slice now, the rest in later turns of the loop.

    A step that raises is a bug: it is logged, and the remaining steps are skipped. The caller must not expect that all
    steps are done when this returns.
    """
    until = time.perf_counter() + SLICE_S
    try:
        for _ in steps:
            if time.perf_counter() >= until:
                asyncio.get_running_loop().call_soon(in_turns, steps)
                return
    except Exception:
        log.exception("work in turns failed", work=getattr(steps, "__qualname__", type(steps).__name__))
