"""How late the event loop runs, and with how many tasks: the first thing to look at when everything is slow."""

from __future__ import annotations

import asyncio
import collections
from typing import Final

import msgspec

INTERVAL_S: Final = 0.5
WINDOW: Final = 120  # measurements: the worst of the last minute is told


class LagStatistics(msgspec.Struct, frozen=True):
    """How long a callback that was due waited for its turn, and how much runs."""

    lag_s: float  # the last one
    worst_lag_s: float  # of the last minute
    tasks: int  # not done now


class LoopLag:
    """Asks to be called at a time and looks how much later it is; one timer, no task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = INTERVAL_S) -> None:
        self._loop = loop
        self._interval = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._lags: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def start(self) -> None:
        """Begin to measure."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(due, self._measure, due)

    def _measure(self, due: float) -> None:
        self._lags.append(max(0.0, self._loop.time() - due))
        self._arm()

    def statistics(self) -> LagStatistics:
        """The last measurement, the worst of the last minute, and the tasks of this moment."""
        last, worst = (self._lags[-1], max(self._lags)) if self._lags else (0.0, 0.0)
        return LagStatistics(lag_s=last, worst_lag_s=worst, tasks=len(asyncio.all_tasks(self._loop)))
