"""How late the event loop runs, and with how many tasks: the first thing to look at when everything is slow.

A watchdog: one timer of the loop that notes when it is called, and one thread that looks when it is not. A turn of the
loop that takes long is counted, and one line in the log names what ran. Nothing is done per message or per callback.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import threading
import time
from types import FrameType
from typing import Final

import msgspec
import structlog

from gateway.observe.metrics import Histogram

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

    lag_s: float  # the last one
    worst_lag_s: float  # of the last minute
    slow_turn_s: Histogram  # turns that took more than `SLOW_S` of the processor, by what they took
    longest_turn_s: float  # of these, since the start
    tasks: int  # not done now


class LoopLag:
    """Asks to be called at a time and looks how much later it is; one timer and one thread, no task.

    What a turn took is what the loop's thread had of the processor while the timer was overdue: on a busy machine
    that is less than the lag, and only what is ours counts as slow. (At most `BEAT_S` before the turn is in it too.)
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing is measured before `start`."""
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._lags: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._slow = Histogram(SLOW_BOUNDS_S)
        self._longest = 0.0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._watched = 0  # the loop's thread
        self._beaten = 0.0  # when the timer was called last (`time.monotonic`)
        self._cpu = 0.0  # of the loop's thread then
        self._seen = ""  # what ran when the timer was overdue
        self._told = float("-inf")
        self._untold = 0

    def start(self) -> None:
        """Begin to measure; called in the loop's thread."""
        if self._timer is not None:
            return
        self._watched = threading.get_ident()
        self._arm()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _arm(self) -> None:
        self._beaten, self._cpu = time.monotonic(), time.thread_time()
        due = self._loop.time() + BEAT_S
        self._timer = self._loop.call_at(due, self._measure, due)

    def _measure(self, due: float) -> None:
        lag = max(0.0, self._loop.time() - due)
        self._lags.append(lag)
        if lag >= SLOW_S:
            took = min(lag, time.thread_time() - self._cpu)
            if took >= SLOW_S:
                self._tell(took, lag)
        self._seen = ""
        self._arm()

    def _tell(self, took: float, lag: float) -> None:
        self._slow.observe(took)
        self._longest = max(self._longest, took)
        now = self._loop.time()
        if now - self._told < TELL_S:
            self._untold += 1
            return
        self._told = now
        log.warning(
            "slow turn of the event loop",
            cpu_s=round(took, 3),
            lag_s=round(lag, 3),
            running=self._seen or "it was over before it was seen",
            untold=self._untold,
        )
        self._untold = 0

    # the thread

    def _watch(self) -> None:
        """See what runs, in the middle of a turn that takes long."""
        while not self._stopped.wait(BEAT_S):
            if time.monotonic() - self._beaten >= BEAT_S + SLOW_S / 2:
                frame = sys._current_frames().get(self._watched)
                if frame is not None:
                    self._seen = running(frame)

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
