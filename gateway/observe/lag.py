"""How late the event loop runs, and with how many tasks: the first thing to look at when everything is slow.

A watchdog: one timer of the loop that notes when it is called, and one of the system that interrupts when it is not. A
turn of the loop that takes long is counted, and one line in the log names what ran. Nothing is done per message or per
callback. (No thread looks: it would hold the frames that it sees, and what it let go of last would end in it, proton's
objects among them, while the loop is inside proton.)
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

from gateway.statistics import Histogram, gauge, histogram

log = structlog.get_logger(__name__)

BEAT_S: Final = 0.05
WINDOW: Final = 1200  # measurements: the worst of the last minute is told
SLOW_S: Final = 0.1  # of processor time in one turn: more is a fault of ours
SLOW_BOUNDS_S: Final = (0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TELL_S: Final = 10.0  # between two lines in the log
DEPTH: Final = 4  # functions that are named, from the inside
OURS: Final = ("gateway.", "protocols.", "mapping.", "flowcontrol.")


class LagStatistics(msgspec.Struct, frozen=True):
    """How long a callback that was due waited for its turn, how long turns take, and how much runs."""

    lag_s: Annotated[float, gauge("how long the last timer that was due waited for its turn")]
    worst_lag_s: Annotated[float, gauge("how long a timer waited for its turn, the longest of the last minute")]
    slow_turn_s: Annotated[Histogram, histogram("turns of the event loop that took long, by their CPU time")]
    longest_turn_s: Annotated[float, gauge("CPU time of the longest turn since the start")]
    tasks: Annotated[int, gauge("asyncio tasks")]


class LoopLag:
    """Asks to be called at a time and looks how much later it is; two timers, no task.

    What a turn took is what the loop's thread had of the processor while the timer was overdue: on a busy machine
    that is less than the lag, and only what is ours counts as slow. (At most `BEAT_S` before the turn is in it too.)
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._lags: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._slow = Histogram(SLOW_BOUNDS_S)
        self._longest = 0.0
        self._former: Any = None  # handler of the signal
        self._interrupts = False
        self._cpu = 0.0  # of the loop's thread when the timer was called last
        self._seen: collections.Counter[str] = collections.Counter()  # what ran when the timer was overdue
        self._told = float("-inf")
        self._untold = 0

    def start(self) -> None:
        """Begin to measure; called in the loop's thread."""
        if self._timer is not None:
            return
        self._interrupts = threading.current_thread() is threading.main_thread()  # signals are handled there only
        if self._interrupts:
            self._former = signal.signal(signal.SIGVTALRM, self._see)
        self._arm()

    def stop(self) -> None:
        """Measure no more."""
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
                self._tell(took, lag)
        self._seen.clear()
        self._arm()

    def _tell(self, took: float, lag: float) -> None:
        self._slow.observe(took)
        self._longest = max(self._longest, took)
        now = self._loop.time()
        if now - self._told < TELL_S:
            self._untold += 1
            return
        self._told = now
        seen = self._seen.most_common(1)
        log.warning(
            "slow turn of the event loop",
            cpu_s=round(took, 3),
            lag_s=round(lag, 3),
            running=seen[0][0] if seen else "it was over before it was seen",
            untold=self._untold,
        )
        self._untold = 0

    def _see(self, _number: int, frame: FrameType | None) -> None:
        """So much of the processor was used since the timer was called last: what runs?

        What was seen most often is told: the last look may be behind what took long.
        """
        self._seen[running(frame)] += 1

    def statistics(self) -> LagStatistics:
        """The last measurement, the worst of the last minute, the slow turns, and the tasks of this moment."""
        last, worst = (self._lags[-1], max(self._lags)) if self._lags else (0.0, 0.0)
        return LagStatistics(
            lag_s=last,
            worst_lag_s=worst,
            slow_turn_s=self._slow,
            longest_turn_s=self._longest,
            tasks=len(asyncio.all_tasks(self._loop)),
        )


def running(frame: FrameType | None) -> str:
    """The innermost functions of a stack, our own if there are any: `module.function:line < its caller`."""
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
