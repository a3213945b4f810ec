"""A context for fixtures of a module, which pytest-asyncio enters and leaves in different tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def in_one_task(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave `context` in one task of its own, as a task group inside it requires."""
    ready: asyncio.Queue[T] = asyncio.Queue()
    over = asyncio.Event()

    async def hold() -> None:
        async with context as made:
            ready.put_nowait(made)
            await over.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(hold())
        yield await ready.get()
        over.set()
