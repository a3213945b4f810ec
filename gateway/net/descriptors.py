"""Pauses listeners before the process runs out of file descriptors, so that management, Kafka and the disk keep some.

The kernel allocates the lowest free number, so the number of a new descriptor shows whether the reserve is touched.
That costs two system calls, however many files are open. Clients of a paused listener wait in the kernel's backlog.
"""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Annotated, Final, Protocol

import msgspec
import structlog

from gateway.runtime.failures import Repeats
from gateway.runtime.spawn import Spawn
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

RESERVE: Final = 64
RETRY_S: Final = 0.25
WARN_INTERVAL_S: Final = 60.0


class Pausable(Protocol):
    """A listener. It is a Protocol because `gateway.net.listener` imports this module."""

    def pause(self) -> None:
        """Stop accepting; clients wait."""

    async def resume(self) -> None:
        """Accept again."""


class DescriptorStatistics(msgspec.Struct, frozen=True):
    """The limit of open files, and how often listeners have paused because of it."""

    limit: Annotated[int, gauge("open files that the process may have")]
    paused: Annotated[int, gauge("1 while listeners wait for free descriptors")]
    pauses_total: Annotated[int, counter("how often listeners had to wait for descriptors")]


class Descriptors:
    """Watches the open files of the process."""

    def __init__(self) -> None:
        self.paused = False
        self._pauses = 0
        self._repeats = Repeats(WARN_INTERVAL_S)
        self.listeners: set[Pausable] = set()  # the listeners to pause
        self._spawn: Spawn | None = None

    def watch(self, spawn: Spawn) -> None:
        """Enable pausing; `spawn` starts the task that resumes the listeners."""
        self._spawn = spawn

    def accepted(self) -> None:
        """A socket was accepted: pause all listeners if the reserve is touched."""
        if self.paused or self._spawn is None or not self._reserve_is_touched():
            return
        self.paused = True
        self._pauses += 1
        if self._repeats.suppressed() is not None:
            log.error(
                "nearly all open files are in use: no connection is accepted until some are closed"
                " (raise the limit: ulimit -n, LimitNOFILE)",
                free=RESERVE,
                limit=_limit(),
            )
        asyncio.get_running_loop().call_soon(self._pause)  # uvloop's server cannot be closed within an accept

    def _pause(self) -> None:
        for listener in self.listeners:
            listener.pause()
        self._check_later()

    def _check_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_S, self._check_again)

    def _check_again(self) -> None:
        if self._reserve_is_touched():
            self._check_later()
            return
        self.paused = False
        assert self._spawn is not None
        self._spawn(self._resume())

    async def _resume(self) -> None:
        for listener in tuple(self.listeners):
            await listener.resume()

    def _reserve_is_touched(self) -> bool:
        try:
            number = os.dup(2)
        except OSError:
            return True
        os.close(number)
        limit = _limit()
        return number >= max(limit - RESERVE, limit // 2)

    def statistics(self) -> DescriptorStatistics:
        """Return the limit and whether listeners are paused."""
        return DescriptorStatistics(_limit(), int(self.paused), self._pauses)


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # not cached: prlimit may raise it while we run


descriptors: Final = Descriptors()
"""The instance of this process."""
