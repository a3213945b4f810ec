"""How long somebody waits for Kafka: as long as it answers anything at all."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Final

SILENT_S: Final = 8.0
"""After this time without any answer of Kafka's, whoever waits is told. Most clients give up after ten seconds or more;
a living Kafka answers the heartbeat of `Topics` every five."""


class Patience:
    """Tells a Kafka that is slow, or waits for a group's members, from one that is silent."""

    def __init__(self, clock: Callable[[], float], silence_s: float = SILENT_S) -> None:
        """`clock` gives monotonic seconds; after `silence_s` without an answer Kafka is silent."""
        self._clock = clock
        self._silence_s = silence_s
        self._heard = -math.inf

    def heard(self) -> None:
        """Kafka has answered something."""
        self._heard = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer; infinite before the first one."""
        return self._clock() - self._heard

    @contextlib.asynccontextmanager
    async def bound(self, limit_s: float = math.inf) -> AsyncIterator[None]:
        """Bound a wait, by `limit_s` seconds at most, though Kafka answers.

        Raises:
            TimeoutError: nothing was heard for `silence_s`, or the limit is reached.
        """
        async with asyncio.timeout(None) as scope:
            wait = _Wait(self._left, self._clock() + limit_s, self._clock(), scope)
            wait.look()
            try:
                yield
            finally:
                wait.end()

    def _left(self, begun: float, end: float) -> float:
        """Seconds until a wait that has begun then is over, unless Kafka answers before; at `end` in any case."""
        return min(max(begun, self._heard) + self._silence_s, end) - self._clock()


class _Wait:
    """Ends a scope when its time is over, which answers put off; no cycle is left when it ends itself."""

    __slots__ = ("_begun", "_end", "_left", "_scope", "_timer")

    def __init__(self, left: Callable[[float, float], float], end: float, begun: float, scope: asyncio.Timeout) -> None:
        self._left = left
        self._end = end
        self._begun = begun
        self._scope: asyncio.Timeout | None = scope
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        if self._scope is None:
            return
        loop = asyncio.get_running_loop()
        left = self._left(self._begun, self._end)
        if left > 0:
            self._timer = loop.call_later(left, self.look)
        else:
            self._scope.reschedule(loop.time())

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._scope = None
