"""A TCP proxy that simulates network faults: delay, throttling, cut frames, black holes, half-open connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from loadtest.clients.talk import reset

PIECE: Final = 64 * 1024
AHEAD: Final = 64  # pieces in transit in one direction

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Reach = Callable[[asyncio.StreamWriter], Awaitable[Peer]]
"""Opens the connection for an accepted client; OSError if there is none for it."""


class Pair:
    """A connection through the proxy: the accepted one and the one to the target."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far
        self.forgotten = False  # the far side was closed without notice to the near side

    def cut(self) -> None:
        """Reset both connections."""
        for writer in (self.near, self.far):
            reset(writer)
            writer.transport.abort()


class Proxy:
    """Forwards the bytes of each connection to another one.

    Attributes:
        delay_s: delay of every piece in each direction.
        rate: bytes per second in each direction of each connection. None means no limit.
        accepted: number of accepted connections.
        cuts: number of connections that were cut.
    """

    def __init__(self, target: tuple[str, int] | Reach) -> None:
        """Prepare a proxy that does not listen yet, to one address or to what is opened for each client."""
        self.delay_s = 0.0
        self.rate: float | None = None
        self.accepted = 0
        self.cuts = 0
        self._reach: Reach = target if callable(target) else lambda _: asyncio.open_connection(*target)
        self._port = 0  # a free one
        self._flows = asyncio.Event()
        self._flows.set()
        self._to_cut = 0
        self._pairs: set[Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens on."""
        return "127.0.0.1", self._port

    async def start(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self._port, backlog=4096)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def block(self) -> None:
        """Become a black hole: connections can be opened, but nothing is forwarded until `unblock`."""
        self._flows.clear()

    def unblock(self) -> None:
        """Forward again, starting with the held data."""
        self._flows.set()

    def forget(self) -> None:
        """Close the far side of all connections; the near sides never notice (half-open)."""
        for pair in self._pairs:
            pair.forgotten = True
            pair.far.transport.abort()

    def cut(self, count: int) -> None:
        """Cut `count` connections, each in the middle of the next piece it forwards."""
        self._to_cut += count

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        pair = None
        try:
            await self._flows.wait()
            far_reader, far_writer = await self._reach(writer)
            pair = Pair(writer, far_writer)
            self._pairs.add(pair)
            async with asyncio.TaskGroup() as group:
                for source, drain in ((reader, far_writer), (far_reader, writer)):
                    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(AHEAD)
                    group.create_task(self._take(source, due))
                    group.create_task(self._give(pair, due, drain))
            for one in (far_writer, writer):
                one.close()
                await one.wait_closed()
        except* OSError:
            pass  # one side has broken, so both are cut
        finally:
            if pair is not None:
                self._pairs.discard(pair)
                pair.cut()
            writer.transport.abort()

    async def _take(self, source: asyncio.StreamReader, due: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            try:
                data = await source.read(PIECE)
            except OSError:
                data = b""
            await due.put((loop.time() + self.delay_s, data))

    async def _give(self, pair: Pair, due: asyncio.Queue[tuple[float, bytes]], drain: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            at, data = await due.get()
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            await self._flows.wait()
            if pair.forgotten:
                if drain is pair.far:
                    if not data:
                        raise ConnectionResetError  # the near side has closed
                    continue
                await loop.create_future()  # never forwards anything
            if not data:
                if not drain.is_closing():
                    drain.write_eof()  # the other side may still answer
                return
            if self._to_cut and len(data) > 1:
                self._to_cut -= 1
                self.cuts += 1
                drain.write(data[: len(data) // 2])
                with contextlib.suppress(OSError):
                    await drain.drain()
                raise ConnectionResetError
            drain.write(data)
            await drain.drain()
            if self.rate is not None:
                await asyncio.sleep(len(data) / self.rate)
