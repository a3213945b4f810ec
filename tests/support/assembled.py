"""The parts of a gateway in the test's own process, made by `gateway.assembly` as the application makes them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from gateway.assembly import ListenerSecurity, Log, Process, State, open_listener_security, open_log, open_state
from gateway.config import Config
from gateway.spawn import Tasks


class WatchedTasks(Tasks):
    """Whose jobs may not fail; in the application a failure is contained where it belongs."""

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
    """All of a gateway but its listeners."""

    process: Process
    security: ListenerSecurity
    log: Log
    state: State

    def check(self) -> None:
        """Nothing in the background has failed."""
        assert isinstance(self.process.tasks, WatchedTasks)
        self.process.tasks.check()


@contextlib.asynccontextmanager
async def assembled(
    bootstrap: str, *, create: bool, wait: bool = True, data_dir: Path | None = None, **settings: Any
) -> AsyncIterator[Assembled]:
    """Start everything, and stop it in reverse order.

    Args:
        bootstrap: of Kafka.
        create: whether unknown topics are made.
        wait: until what the gateway keeps in Kafka is loaded.
        data_dir: who has the same one after another is the same gateway; None: one of its own.
        settings: tables of the configuration, and keys of `kafka`, as dictionaries.
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
