"""A topic that the live reader watches while somebody needs it, and a little longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.kafka.contracts import Fanout
from gateway.kafka.read.live_reader import LiveReader


class LingeringWatch:
    """One `Fanout`'s place at the end of one topic: taken with the first need, given up a while after the last."""

    def __init__(
        self, live_reader: LiveReader, topic: str, fanout: Fanout, in_use: Callable[[], object], *, linger_s: float
    ) -> None:
        """Nothing is read before `hold`.

        `in_use` is true while it is needed; `linger_s` seconds after that it may end.
        """
        self.held = False  # whether the live reader watches; what is stored from now on is seen
        self._live_reader = live_reader
        self._topic = topic
        self._fanout = fanout
        self._in_use = in_use
        self._linger_s = linger_s
        self._taking = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def hold(self) -> None:
        """Be sure that what is stored from now on is seen. Raises Refused when Kafka does not answer."""
        async with self._taking:
            if not self.held:
                await self._live_reader.watch(self._topic, self._fanout)
                self.held = True

    def release(self) -> None:
        """Somebody has no more need; whether another has is asked when the time is over."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._rest)

    def close(self) -> None:
        """The timer ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        self._timer = None
        if self.held and not self._in_use():
            self.held = False
            self._live_reader.unwatch(self._topic, self._fanout)
