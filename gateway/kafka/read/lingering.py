"""A watch of one topic that outlasts its use by a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.kafka.contracts import Fanout
from gateway.kafka.read.live_reader import LiveReader


class LingeringWatch:
    """Keeps one `Fanout` watching one topic from the first use until a while after the last."""

    def __init__(
        self, live_reader: LiveReader, topic: str, fanout: Fanout, in_use: Callable[[], object], *, linger_s: float
    ) -> None:
        """Watch nothing before `hold`.

        `in_use` returns whether the watch is needed; it may end `linger_s` seconds after it was last needed.
        """
        self.held = False  # whether the live reader watches, so that new records are seen
        self._live_reader = live_reader
        self._topic = topic
        self._fanout = fanout
        self._in_use = in_use
        self._linger_s = linger_s
        self._taking = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def hold(self) -> None:
        """Ensure that records stored from now on are seen. Raises Refused when Kafka does not answer."""
        async with self._taking:
            if not self.held:
                await self._live_reader.watch(self._topic, self._fanout)
                self.held = True

    def release(self) -> None:
        """Report that one use has ended; whether others remain is checked when the time is over."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._expire)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.held and not self._in_use():
            self.held = False
            self._live_reader.unwatch(self._topic, self._fanout)
