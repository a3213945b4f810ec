"""Starts all background work of the gateway, and contains its failures.

`Tasks.spawn` starts one job; `keep_running` runs a part that must not end. Neither lets a failure spread: it is logged
and counted (`gateway.runtime.failures`), a part is restarted after a back-off, and code that awaits a job still gets
its exception. Only the failure of work started by `Tasks.essential` ends the process, in order: drain, close, exit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from flowcontrol.backoff import backoff_s
from gateway.runtime.failures import ExpectedError, failures

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
"""Starts one job in the background and contains its failure, see `Tasks.spawn`."""

RETRY_S: Final = 0.1
RETRY_MOST_S: Final = 10.0
CALM_S: Final = 60.0
"""After this time without a failure, the next back-off starts with the shortest delay again."""


class Tasks:
    """All background tasks of the process."""

    def __init__(self, fatal: Callable[[BaseException], None]) -> None:
        """`fatal` is called with the failure of essential work, possibly several times."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fatal = fatal

    def __len__(self) -> int:
        """Return the number of running tasks."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a job. Its failure is logged and counted under its name and affects nothing else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def essential(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start essential work: its failure shuts the process down cleanly."""
        task = self.spawn(work)
        task.add_done_callback(self._check)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            failures.report(place_of(task), error)

    def _check(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fatal(error)

    async def close(self) -> None:
        """Cancel the remaining tasks and wait for them."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks))


def place_of(task: asyncio.Task[Any]) -> str:
    """Return the name of a task's coroutine, such as `PartitionQueue._run`; its failures are counted under it."""
    return getattr(task.get_coro(), "__qualname__", "task")


def start_contained(work: Coroutine[Any, Any, None], place: str) -> asyncio.Task[None]:
    """Run work whose end its owner controls, outside of `Tasks`. A failure is logged and contained."""

    async def contained() -> None:
        try:
            await work
        except Exception as error:
            failures.report(place, error)

    return asyncio.get_running_loop().create_task(contained())


async def keep_running(work: Callable[[], Coroutine[Any, Any, None]], place: str, what: str = "") -> None:
    """Run `work` until it returns; after a failure log it, wait and run it again.

    `work` continues from the state that it has reached. `place` and `what`: see `gateway.runtime.failures`.
    """
    loop = asyncio.get_running_loop()
    attempt = 0
    while True:
        since = loop.time()
        try:
            await work()
            return
        except Exception as error:  # contained here, whatever it is
            failures.report(place, error, what)
        attempt = 0 if loop.time() - since > CALM_S else attempt
        failures.begin_retry(place)
        try:
            await asyncio.sleep(backoff_s(attempt, base=RETRY_S, cap=RETRY_MOST_S, random=random.random))
        finally:
            failures.end_retry(place)
        attempt += 1


async def run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Run several coroutines concurrently until all have returned; the first failure cancels the others."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log and count the failure of a callback, a timer or a library's task (the loop's exception handler)."""
    error = context.get("exception")
    if error is None:
        loop.default_exception_handler(context)
    elif not isinstance(error, ExpectedError) and not _is_late_tls_write(context):
        failures.report("callback", error, str(context.get("message", "")))


def _is_late_tls_write(context: dict[str, Any]) -> bool:
    """Whether uvloop's TLS wrote to a socket that had just been closed: its connection has ended anyway."""
    late = str(context["exception"]).endswith("; the handler is closed")
    return late and context.get("message") == "Fatal error on SSL protocol"
