"""A watch of one topic that outlasts its use by a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gateway.kafka.contracts import Fanout
from gateway.kafka.read.live_reader import LiveReader


class LingeringWatch(msgspec.Struct, eq=False):
    """Keeps one `Fanout` watching one topic from the first use until a while after the last."""

    _live_reader: LiveReader
    _topic: str
    _fanout: Fanout
    _in_use: Callable[[], object]  # whether the watch is needed
    _linger_s: float  # how long it lasts after it was last needed
    held: bool = False  # whether the live reader watches, so that new records are seen
    _taking: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    _timer: asyncio.TimerHandle | None = None

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
