"""What the clients of all protocols that are asyncio protocols share: greeting, goodbye, failure, and how they open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, cast

from loadtest.beside import in_turn

C = TypeVar("C", bound=asyncio.Protocol)


class Connection(asyncio.Protocol):
    """One connection to a gateway.

    Attributes:
        greeting: the first bytes that it sends.
        closing: the last ones, if it closes properly.
    """

    greeting = b""
    closing = b""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._promises: list[asyncio.Future[Any]] = []

    def promise(self) -> asyncio.Future[Any]:
        """Return a new future that gets the error if the connection fails before it is done."""
        self._promises.append(asyncio.get_running_loop().create_future())
        return self._promises[-1]

    @property
    def is_open(self) -> bool:
        """Whether it can write."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
        self.write(self.greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is promised."""
        self.fail(exc or ConnectionResetError("connection closed"))

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes, if it is open."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Say goodbye and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self.closing)
            self._transport.close()

    def drop(self) -> None:
        """End the connection without any goodbye."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Give an error to what is promised and not done."""
        for future in self._promises:
            if not future.done():
                future.set_exception(error)


async def join(client: C, address: tuple[str, int], **options: Any) -> C:
    """Connect a client to the address of a gateway, and return it; `options` are those of `create_connection`."""
    await asyncio.get_running_loop().create_connection(lambda: client, *address, **options)
    return client


async def join_all(clients: Iterable[C], address: tuple[str, int], ready: Callable[[C], Awaitable[object]]) -> None:
    """Connect many clients, several at a time; `ready` returns what a client's handshake resolves."""

    async def one(client: C) -> None:
        await ready(await join(client, address))

    await in_turn(clients, one)
