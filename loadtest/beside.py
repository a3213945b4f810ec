"""Tasks that run alongside a block, and end with it; and work that is done several at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 50


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run `works` as tasks during the block, and cancel the rest after it.

    The first exception of the block or of a task is raised unchanged.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield tasks
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def in_turn(things: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int = AT_ONCE) -> None:
    """Run `work` for every thing, `at_once` at a time."""
    todo = iter(things)

    async def worker() -> None:
        for thing in todo:
            await work(thing)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
