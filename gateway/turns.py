"""Work over what a client can make many of, in turns of the event loop: everybody else is served in between.

Ten thousand links that end, sessions that expire or subscribers of one message are each cheap; all of them in one turn
would hold up every other client. ADR 0030.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import structlog

log = structlog.get_logger(__name__)

SLICE_S: Final = 0.01
"""How long one piece of work may keep the loop. A turn has a few such pieces at most, and Kafka's answers, which every
client waits for, come in between."""

AT_ONCE: Final = 64  # tasks that go on in a turn; those for whom its share was not enough wait again


class Share:
    """The part of each turn of the loop that one kind of work has, which many tasks do: `await share.rest()` between.

    Kafka's answer may let hundreds of tasks go on in the same turn. Each is short; together they are not.
    """

    __slots__ = ("_until", "_waiting")

    def __init__(self) -> None:
        self._until: float | None = None  # None: nobody has asked in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def rest(self) -> None:
        """Go on at once while this turn's part is not used up; else in a later turn."""
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
        """The next turn has begun: some of those who wait go on, for whom it may be enough."""
        self._until = None
        for _ in range(min(AT_ONCE, len(self._waiting))):
            later = self._waiting.popleft()
            if not later.done():  # else cancelled
                later.set_result(None)
        if self._waiting:
            self._is_left()


class Slices:
    """The turns of one coroutine that looks through much: `await slices.rest()` between its pieces."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def rest(self) -> None:
        """Go on in the next turn of the loop when this one was long enough."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S


def in_turns(steps: Iterator[object]) -> None:
    """Do steps: some of them now, the others in later turns of the loop, a slice in each.

    A step that raises is our bug: it is logged, and what a generator had still to do is not done. Whoever asks must not
    depend on all steps being done when this returns.
    """
    until = time.perf_counter() + SLICE_S
    try:
        for _ in steps:
            if time.perf_counter() >= until:
                asyncio.get_running_loop().call_soon(in_turns, steps)
                return
    except Exception:
        log.exception("work in turns failed", work=getattr(steps, "__qualname__", type(steps).__name__))
