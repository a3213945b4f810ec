"""The one door through which the gateway starts background work, and what happens when that fails.

`Tasks.spawn` starts one job; `keep_on` makes a part go on that must not end. Neither lets a failure go further than
the job: it is told and counted (`gateway.failures`), a part is tried again after a back-off, and whoever awaits a job
still gets its exception. Only what is started by `Tasks.essential` ends the process, in order: drain, close, exit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from flowcontrol.backoff import Backoff
from gateway.failures import ForeseenError, failures

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
"""Starts one job in the background; its failure is contained, see `Tasks.spawn`."""

RETRY_S: Final = 0.1
RETRY_MOST_S: Final = 10.0
CALM_S: Final = 60.0
"""A part that has worked for so long since its last failure begins again with the shortest wait."""

_backoff: Final = Backoff(RETRY_S, RETRY_MOST_S, random=random.random)


class Tasks:
    """All background tasks of the process."""

    def __init__(self, fatal: Callable[[BaseException], None]) -> None:
        """`fatal` is told the failure of something essential, once or more."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fatal = fatal

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a job. When it fails that is told and counted under its name, and nothing else ends by it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def essential(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start what the process cannot be without: its failure ends the process, in order."""
        task = self.spawn(work)
        task.add_done_callback(self._check)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            failures.tell(place_of(task), error)

    def _check(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fatal(error)

    async def close(self) -> None:
        """Cancel what is left, and wait for its end."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks))


def place_of(task: asyncio.Task[Any]) -> str:
    """The name of a task's coroutine, such as `PartitionQueue._run`: what its failure is counted under."""
    return getattr(task.get_coro(), "__qualname__", "task")


def aside(work: Coroutine[Any, Any, None], place: str) -> asyncio.Task[None]:
    """Run what belongs to a library's object, which ends it; a failure is told, and is nobody else's."""

    async def contained() -> None:
        try:
            await work
        except Exception as error:
            failures.tell(place, error)

    return asyncio.get_running_loop().create_task(contained())


async def keep_on(work: Callable[[], Coroutine[Any, Any, None]], place: str, what: str = "") -> None:
    """Do `work` until it returns; when it fails tell, wait and do it again, for ever.

    `work` begins anew from what it has reached so far. `place` and `what`: see `gateway.failures`.
    """
    loop = asyncio.get_running_loop()
    attempt = 0
    while True:
        since = loop.time()
        try:
            await work()
            return
        except Exception as error:  # contained here, whatever it is
            failures.tell(place, error, what)
        attempt = 0 if loop.time() - since > CALM_S else attempt
        failures.begin_retry(place)
        try:
            await asyncio.sleep(_backoff.delay(attempt))
        finally:
            failures.end_retry(place)
        attempt += 1


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Do several works at once until all have returned; they end with this call, and the first failure ends them."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's exception handler: a callback, a timer or a library's task has failed; the loop goes on."""
    error = context.get("exception")
    if error is None:
        loop.default_exception_handler(context)
    elif not isinstance(error, ForeseenError):
        failures.tell("callback", error, str(context.get("message", "")))
