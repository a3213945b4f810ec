"""Holds back what a process must not do when it goes on after a freeze: others may have taken it for dead.

SIGSTOP, a machine without memory, a virtual one that is moved: nothing of ours runs, and nobody tells us. The first who
asks for the time afterwards shuts the fence. Whoever minds has said how long is too long, and opens it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

TICK_S: Final = 1.0
"""So often the time is looked at by a timer: after a freeze timers are due, and run before any task goes on."""


class Fence:
    """Open as long as nobody minds (`guard`).

    Attributes:
        is_open: whether all may go on.
        is_shut: set while it is not.
        exempt: a Kafka topic into which is written all the same: what is written there tells that we are back.
        freezes: how many were noticed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self.is_open = True
        self.is_shut = asyncio.Event()
        self.exempt = ""
        self.freezes = 0
        self._clock = clock
        self._ran = self._limit_s = float("inf")
        self._passed = asyncio.Event()
        self._passed.set()
        self._listeners: list[Callable[[], None]] = []
        self._then: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def guard(self, limit_s: float, exempt: str) -> None:
        """Shut from now on when the process has not run for longer than `limit_s`; see `exempt`."""
        self._limit_s, self.exempt = limit_s, exempt
        self._ran = self._clock()
        self._tick()

    def unguard(self) -> None:
        """Nobody minds any more."""
        self._ran = self._limit_s = float("inf")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.open()

    def listen(self, shut: Callable[[], None]) -> None:
        """Call `shut` each time when it shuts."""
        self._listeners.append(shut)

    def now(self) -> float:
        """The time in seconds; the clock of all who may be the first to run after a freeze."""
        now = self._clock()
        if now - self._ran > self._limit_s:
            self._ran = now
            self._shut()
        elif self._ran < now:
            self._ran = now
        return now

    def passes(self, topic: str) -> bool:
        """Whether something may go into a Kafka topic, and its answer be told."""
        return self.is_open or topic == self.exempt

    async def passed(self) -> None:
        """Wait until it is open."""
        await self._passed.wait()

    def then(self, call: Callable[[], None]) -> None:
        """Call it once when the fence opens; of equal ones, one."""
        self._then[call] = None

    def open(self) -> None:
        """What others have done is known: all go on."""
        if self.is_open:
            return
        self.is_open = True
        self.is_shut.clear()
        then, self._then = self._then, {}
        for call in then:
            call()
        self._passed.set()

    def _shut(self) -> None:
        self.freezes += 1
        self.is_open = False
        self._passed.clear()
        self.is_shut.set()
        for listener in self._listeners:
            listener()

    def _tick(self) -> None:
        self.now()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
