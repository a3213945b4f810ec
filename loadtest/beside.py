"""Tasks that run alongside a block, and end with it; work that is done several at a time; waits for conditions."""

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


async def until(condition: Callable[[], bool], what: str, limit_s: float, step_s: float = 0.02) -> None:
    """Check a condition every `step_s` until it is true. Raises TimeoutError, which says `what` was waited for."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(step_s)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {limit_s:g} s") from None
