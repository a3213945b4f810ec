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
        """Bound a wait.

        Args:
            limit_s: for how many seconds at most, though Kafka answers.

        Raises:
            TimeoutError: nothing was heard for `silence_s`, or the limit is reached.
        """
        loop = asyncio.get_running_loop()
        begun = self._clock()
        timer: asyncio.TimerHandle | None = None
        async with asyncio.timeout(None) as scope:

            def look() -> None:
                nonlocal timer
                left = min(max(begun, self._heard) + self._silence_s, begun + limit_s) - self._clock()
                if left > 0:
                    timer = loop.call_later(left, look)
                else:
                    scope.reschedule(loop.time())

            look()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
