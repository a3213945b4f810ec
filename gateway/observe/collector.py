"""When Python looks for reference cycles: seldom while there is work, and when there is none (ADR 0030).

The C library is tidied in the same breath: what broken TLS handshakes leave behind is holes between what is held.

What connections and messages are made of is freed by counting (`tests/gateway/test_cycles.py`). Cycles are left by rare
things: a Kafka consumer that ends, an assignment that changes, an exception with its traceback.
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

from gateway.statistics import counter, gauge

THRESHOLDS: Final = (20_000, 20, 50)
"""New objects between two looks at the youngest; such looks between two at the middle ones; those between two at all.
Python's 700 would look at the young 30 times as often, and find nothing."""
LOOK_S: Final = 1.0
IDLE_CPU: Final = 0.05  # share of the processor below which a second counts as idle
WORTH: Final = 1000  # young objects that are worth a look
FULL_S: Final = 30.0  # between two full collections when idle, and
FULL_SHARE: Final = 500  # so many times as long as the last one took: a large heap is looked at less often


class CollectorStatistics(msgspec.Struct):
    """What the collector did since the start; its pauses are turns of the loop."""

    collections_total: Annotated[int, counter("times that Python looked for reference cycles")] = 0
    idle_collections_total: Annotated[int, counter("looks for cycles because there was nothing else to do")] = 0
    found_total: Annotated[int, counter("objects found in cycles")] = 0
    paused_s_total: Annotated[float, counter("time spent looking for cycles")] = 0.0
    longest_pause_s: Annotated[float, gauge("the longest look for cycles since the start")] = 0.0


class Collector:
    """The collector's policy; one timer of the loop."""

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
        """What there is now lives as long as the process, and is never looked at again; look at the rest when idle."""
        if gc.isenabled():  # whoever has switched it off looks for cycles in another way
            gc.collect()
            gc.freeze()
        gc.callbacks.append(self._note)
        self._arm()

    def stop(self) -> None:
        """Leave it to Python."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._note)

    def _arm(self) -> None:
        self._cpu = time.thread_time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        idle = time.thread_time() - self._cpu < IDLE_CPU * LOOK_S
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
        """Called by the collector."""
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
        """Since the start."""
        return msgspec.structs.replace(self._counts)


def trimmer() -> Callable[[int], int]:
    """What gives free memory back to the system: glibc's `malloc_trim(3)`; elsewhere nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return lambda _pad: 0


def calm() -> None:
    """Before the gateway is imported: what is made then lives for ever, and messages are freed by counting."""
    gc.set_threshold(*THRESHOLDS)
