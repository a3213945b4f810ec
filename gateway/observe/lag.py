"""Measures the event loop's lag and its slow turns: the first thing to check when everything is slow.

A watchdog of two timers: one of the loop, which measures how late it is called, and one of the system, whose signal
interrupts the loop if the first is overdue. A slow turn is counted, and a log line names the running function. Nothing
is done per message or per callback. (A watching thread would hold references to the frames that it samples, so objects,
including proton's, could be freed in that thread while the loop is inside proton.)
"""

from __future__ import annotations

import asyncio
import collections
import signal
import threading
import time
from types import FrameType
from typing import Annotated, Any, Final

import msgspec
import structlog

from gateway.runtime.failures import Repeats
from telemetry.statistics import Histogram, gauge, histogram

log = structlog.get_logger(__name__)

BEAT_S: Final = 0.05
WINDOW: Final = 1200  # measurements: one minute
SLOW_S: Final = 0.1  # of CPU time in one turn: more is a bug of ours
SLOW_BOUNDS_S: Final = (0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LOG_S: Final = 10.0  # between two log lines
DEPTH: Final = 4  # functions in the log line, innermost first
OURS: Final = ("gateway.", "protocols.", "mapping.", "flowcontrol.")


class LagStatistics(msgspec.Struct, frozen=True):
    """Delay of due callbacks, duration of turns, and number of tasks."""

    lag_s: Annotated[float, gauge("delay of the last timer")]
    worst_lag_s: Annotated[float, gauge("longest delay of a timer in the last minute")]
    slow_turn_s: Annotated[Histogram, histogram("slow turns of the event loop, by their CPU time")]
    longest_turn_s: Annotated[float, gauge("CPU time of the longest turn since the start")]
    tasks: Annotated[int, gauge("asyncio tasks")]


class LoopLag:
    """Measures how late a timer is called; two timers, no task.

    A turn's duration is the CPU time of the loop's thread while the timer was overdue. On a busy machine that is less
    than the lag, and only our own CPU time counts as slow. (It may include up to `BEAT_S` before the turn.)
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._lags: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._slow = Histogram(SLOW_BOUNDS_S)
        self._longest = 0.0
        self._former: Any = None  # the previous signal handler
        self._interrupts = False
        self._cpu = 0.0  # CPU time of the loop's thread at the timer's last call
        self._seen: collections.Counter[str] = collections.Counter()  # what ran while the timer was overdue
        self._repeats = Repeats(LOG_S)

    def start(self) -> None:
        """Start measuring. Call it in the loop's thread."""
        if self._timer is not None:
            return
        self._interrupts = threading.current_thread() is threading.main_thread()  # signals are handled there only
        if self._interrupts:
            self._former = signal.signal(signal.SIGVTALRM, self._sample)
        self._arm()

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._interrupts:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
                signal.signal(signal.SIGVTALRM, self._former)

    def _arm(self) -> None:
        self._cpu = time.thread_time()
        if self._interrupts:
            signal.setitimer(signal.ITIMER_VIRTUAL, SLOW_S, SLOW_S)
        due = self._loop.time() + BEAT_S
        self._timer = self._loop.call_at(due, self._measure, due)

    def _measure(self, due: float) -> None:
        lag = max(0.0, self._loop.time() - due)
        self._lags.append(lag)
        if lag >= SLOW_S:
            took = min(lag, time.thread_time() - self._cpu)
            if took >= SLOW_S:
                self._report(took, lag)
        self._seen.clear()
        self._arm()

    def _report(self, took: float, lag: float) -> None:
        self._slow.observe(took)
        self._longest = max(self._longest, took)
        unlogged = self._repeats.suppressed()
        if unlogged is None:
            return
        seen = self._seen.most_common(1)
        log.warning(
            "slow turn of the event loop",
            cpu_s=round(took, 3),
            lag_s=round(lag, 3),
            running=seen[0][0] if seen else "unknown, it ended before it was sampled",
            unlogged=unlogged,
        )

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        """Count the function that runs now: `SLOW_S` of CPU time has passed since the timer's last call.

        The function seen most often is logged, because the last sample may come after the slow part.
        """
        self._seen[running(frame)] += 1

    def statistics(self) -> LagStatistics:
        """Return the current measurements."""
        last, worst = (self._lags[-1], max(self._lags)) if self._lags else (0.0, 0.0)
        return LagStatistics(
            lag_s=last,
            worst_lag_s=worst,
            slow_turn_s=self._slow,
            longest_turn_s=self._longest,
            tasks=len(asyncio.all_tasks(self._loop)),
        )


def running(frame: FrameType | None) -> str:
    """Format the innermost functions of a stack, ours if there are any, as `module.function:line < its caller`."""
    everything: list[str] = []
    ours: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        name = f"{module}.{frame.f_code.co_qualname}:{frame.f_lineno}"
        everything.append(name)
        if module.startswith(OURS):
            ours.append(name)
        frame = frame.f_back
    return " < ".join((ours or everything)[:DEPTH])
