"""The parts of a gateway in the test's process, made by `gateway.process.assembly` as in the application."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from gateway.kafka.log import Log
from gateway.process.assembly import (
    ListenerSecurity,
    Process,
    StateTables,
    open_listener_security,
    open_log,
    open_state,
)
from gateway.runtime.spawn import Tasks
from gateway.settings.config import Config


class WatchedTasks(Tasks):
    """Background tasks that must not fail; in the application the part that started a task handles its failure."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        super().__init__(self.failures.append)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = super().spawn(work)
        task.add_done_callback(self._check)
        return task

    def check(self) -> None:
        failures, self.failures[:] = list(self.failures), []
        if failures:
            raise BaseExceptionGroup("background work failed", failures)


class Assembled(NamedTuple):
    """A gateway without its listeners."""

    process: Process
    security: ListenerSecurity
    log: Log
    state: StateTables

    def check(self) -> None:
        """Raise if a background task has failed."""
        assert isinstance(self.process.tasks, WatchedTasks)
        self.process.tasks.check()


@contextlib.asynccontextmanager
async def assembled(
    bootstrap: str, *, create: bool, wait: bool = True, data_dir: Path | None = None, **settings: Any
) -> AsyncIterator[Assembled]:
    """Start everything, and stop it in reverse order.

    Args:
        bootstrap: Kafka's address.
        create: whether unknown topics are created.
        wait: wait until the gateway's state in Kafka is loaded.
        data_dir: the same directory makes it the same gateway again. None means a new one.
        settings: tables of the configuration, as dictionaries; `kafka` is merged with the keys above.
    """
    tasks = WatchedTasks()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(tasks.check)
        stack.push_async_callback(tasks.close)
        config = Config(
            data_dir=data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory())),
            kafka={"bootstrap_servers": bootstrap, "create_topics": create, **(settings.pop("kafka", None) or {})},
            **{name: table for name, table in settings.items() if table is not None},
        )
        process = Process(config, tasks, stack, asyncio.get_running_loop(), random.Random(7))
        security = await open_listener_security(process)
        log = await open_log(process, config.kafka, security)
        state = await open_state(process, log, security.rules, tasks.failures.append)
        if wait:
            async with asyncio.timeout(60):
                await state.topics.loaded.wait()
        yield Assembled(process, security, log, state)
