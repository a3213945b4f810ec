"""Flushes sockets at the end of an event loop iteration, a bounded number in each."""

from __future__ import annotations

import asyncio
import collections
from typing import Final, Protocol

from gateway.runtime.failures import failures

WRITES_PER_TURN: Final = 128  # about a millisecond


class Flushed(Protocol):
    """An object that collects bytes for a socket."""

    def flush_now(self) -> None:
        """Write the collected bytes."""


class Writes:
    """Pumps and streams to flush at the end of the event loop iteration, a bounded number in each.

    A fan-out to many subscribers makes more of them than one turn should write. The others wait for the next turn, and
    data that comes for them meanwhile leaves with the same write: the busier the loop, the fewer system calls per
    message.
    """

    __slots__ = ("_scheduled", "_waiting")

    def __init__(self) -> None:
        self._waiting: collections.deque[Flushed] = collections.deque()
        self._scheduled = False

    def add(self, pump: Flushed) -> None:
        """Flush `pump` soon. It must not be waiting already."""
        self._waiting.append(pump)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._write)

    def written(self) -> asyncio.Future[None]:
        """Return a future that is done when everything added before was flushed; in the next turn if nothing was."""
        mark = _Mark(asyncio.get_running_loop().create_future())
        self.add(mark)
        return mark.passed

    def _write(self) -> None:
        waiting = self._waiting
        try:
            for _ in range(min(len(waiting), WRITES_PER_TURN)):
                flushed = waiting.popleft()
                try:
                    flushed.flush_now()
                except Exception as error:  # of one socket; the others are flushed
                    failures.report("connection", error)
        finally:
            self._scheduled = bool(waiting)
            if waiting:
                asyncio.get_running_loop().call_soon(self._write)


class _Mark:
    """A place in the queue, whose future is done when it is reached."""

    __slots__ = ("passed",)

    def __init__(self, passed: asyncio.Future[None]) -> None:
        self.passed = passed

    def flush_now(self) -> None:
        if not self.passed.done():  # else cancelled
            self.passed.set_result(None)
