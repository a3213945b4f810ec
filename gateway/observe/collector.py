"""Garbage collection policy: collect reference cycles rarely under load, and when idle (ADR 0030).

The C library's heap is trimmed at the same time, because failed TLS handshakes fragment it.

The objects of connections and messages are freed by reference counting (`tests/gateway/test_cycles.py`). Only rare
events leave cycles: a Kafka consumer that stops, an assignment that changes, an exception with its traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from telemetry.statistics import counter, gauge

THRESHOLDS: Final = (20_000, 20, 50)
"""Thresholds of the three generations. Python's default of 700 would collect the youngest one 30 times as often and
find nothing."""
CHECK_S: Final = 1.0
IDLE_CPU: Final = 0.05  # CPU share below which a second counts as idle
WORTH: Final = 1000  # young objects that justify a collection
FULL_S: Final = 30.0  # minimum time between two full collections when idle
FULL_SHARE: Final = 500  # and this multiple of the last one's duration: large heaps are collected less often


class CollectorStatistics(msgspec.Struct):
    """The collector's work since the start; its pauses block the event loop."""

    collections_total: Annotated[int, counter("garbage collections")] = 0
    idle_collections_total: Annotated[int, counter("garbage collections because the process was idle")] = 0
    found_total: Annotated[int, counter("objects found in reference cycles")] = 0
    paused_s_total: Annotated[float, counter("time spent in garbage collections")] = 0.0
    longest_pause_s: Annotated[float, gauge("longest garbage collection since the start")] = 0.0


class Collector:
    """Applies the policy with one timer of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._counts = CollectorStatistics()
        self._cpu = 0.0
        self._full_took = 0.0
        self._full_at = float("-inf")
        self._trim = trimmer()

    def start(self) -> None:
        """Freeze the existing objects, which live as long as the process, and start collecting when idle."""
        if gc.isenabled():  # if it is disabled, another party collects in its own way
            gc.collect()
            gc.freeze()
        gc.callbacks.append(self._note)
        self._arm()

    def stop(self) -> None:
        """Stop the policy; Python's own thresholds stay."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._note)

    def _arm(self) -> None:
        self._cpu = time.thread_time()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        idle = time.thread_time() - self._cpu < IDLE_CPU * CHECK_S
        if idle and gc.isenabled() and sum(gc.get_count()) > 0:
            now = self._loop.time()
            if now - self._full_at >= max(FULL_S, FULL_SHARE * self._full_took):
                self._counts.idle_collections_total += 1
                gc.collect()
                self._trim(0)
                self._full_at = self._loop.time()
                self._full_took = self._full_at - now
            elif gc.get_count()[0] >= WORTH:
                self._counts.idle_collections_total += 1
                gc.collect(0)
        self._arm()

    def _note(self, phase: str, information: dict[str, Any]) -> None:
        """Measure a collection; called by Python's collector."""
        if phase == "start":
            self._began = time.perf_counter()
            return
        pause = time.perf_counter() - self._began
        counts = self._counts
        counts.collections_total += 1
        counts.found_total += information["collected"]
        counts.paused_s_total += pause
        counts.longest_pause_s = max(counts.longest_pause_s, pause)

    def statistics(self) -> CollectorStatistics:
        """Return the counts since the start."""
        return msgspec.structs.replace(self._counts)


def trimmer() -> Callable[[int], int]:
    """Return glibc's `malloc_trim(3)`, which returns free memory to the system; elsewhere a function without effect."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return lambda _pad: 0


def set_gc_thresholds() -> None:
    """Set the thresholds. Call it before importing the gateway, whose objects live as long as the process."""
    gc.set_threshold(*THRESHOLDS)
