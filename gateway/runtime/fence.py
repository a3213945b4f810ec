"""Blocks writes after the process was frozen, because other gateways may have declared it dead.

A process can freeze by SIGSTOP, memory shortage or the migration of a virtual machine, and gets no notice of it. The
first call of `now` after a freeze shuts the fence. The user of the fence sets the limit (`guard`) and opens it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

TICK_S: Final = 1.0
"""Period of the timer that checks the time. After a freeze it is due and runs before any task continues."""


class Fence:
    """Open unless guarded (`guard`) and shut by a freeze.

    Attributes:
        is_open: whether writes are allowed.
        is_shut: set while they are not.
        exempt: a Kafka topic that may be written in any case, because its records announce that this gateway is back.
        freezes: number of freezes noticed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self.is_open = True
        self.is_shut = asyncio.Event()
        self.exempt = ""
        self.freezes = 0
        self._clock = clock
        self._ran = self._limit_s = float("inf")
        self._opened = asyncio.Event()
        self._opened.set()
        self._listeners: list[Callable[[], None]] = []
        self._on_open: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def guard(self, limit_s: float, exempt: str) -> None:
        """From now on, shut whenever the process has not run for longer than `limit_s`. `exempt`: see the class."""
        self._limit_s, self.exempt = limit_s, exempt
        self._ran = self._clock()
        self._tick()

    def stop_guarding(self) -> None:
        """Stop guarding and open."""
        self._ran = self._limit_s = float("inf")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.open()

    def listen(self, shut: Callable[[], None]) -> None:
        """Call `shut` whenever the fence shuts."""
        self._listeners.append(shut)

    def now(self) -> float:
        """Return the time in seconds and check for a freeze. Code that may run first after a freeze uses this clock."""
        now = self._clock()
        if now - self._ran > self._limit_s:
            self._ran = now
            self._shut()
        elif self._ran < now:
            self._ran = now
        return now

    def allows(self, topic: str) -> bool:
        """Return whether a Kafka topic may be written and its results reported."""
        return self.is_open or topic == self.exempt

    async def wait_open(self) -> None:
        """Wait until the fence is open."""
        await self._opened.wait()

    def call_when_open(self, call: Callable[[], None]) -> None:
        """Call `call` once when the fence opens; equal callbacks are called once."""
        self._on_open[call] = None

    def open(self) -> None:
        """Open: it is known what the other gateways did meanwhile."""
        if self.is_open:
            return
        self.is_open = True
        self.is_shut.clear()
        calls, self._on_open = self._on_open, {}
        for call in calls:
            call()
        self._opened.set()

    def _shut(self) -> None:
        self.freezes += 1
        self.is_open = False
        self._opened.clear()
        self.is_shut.set()
        for listener in self._listeners:
            listener()

    def _tick(self) -> None:
        self.now()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
