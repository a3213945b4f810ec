"""Opens the connections of clients that are asyncio protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from loadtest.beside import in_turn

C = TypeVar("C", bound=asyncio.Protocol)


async def join(client: C, address: tuple[str, int], **options: Any) -> C:
    """Connect a client to the address of a gateway, and return it; `options` are those of `create_connection`."""
    await asyncio.get_running_loop().create_connection(lambda: client, *address, **options)
    return client


async def join_all(clients: Iterable[C], address: tuple[str, int], ready: Callable[[C], Awaitable[object]]) -> None:
    """Connect many clients, several at a time; `ready` returns what a client's handshake resolves."""

    async def one(client: C) -> None:
        await ready(await join(client, address))

    await in_turn(clients, one)
