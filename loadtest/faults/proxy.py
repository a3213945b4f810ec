"""A TCP proxy that does what networks do: delay, throttle, cut in the middle of a frame, fall silent, forget a peer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from typing import Final, cast

PIECE: Final = 64 * 1024
AHEAD: Final = 64  # pieces on their way in one direction
PORTS: Final = (20_000, 32_000)
"""Below the range that the kernel gives to clients, as a broker that comes back must find its port free."""


def free_port() -> int:
    """A port where nobody listens."""
    while True:
        port = random.randint(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


class Pair:
    """A connection through the proxy: the one that was accepted and the one that was made for it."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far
        self.forgotten = False  # the far side has gone and the near side was not told

    def cut(self) -> None:
        """End both sides by a reset."""
        for writer in (self.near, self.far):
            own = writer.get_extra_info("socket")
            if own is not None:
                with contextlib.suppress(OSError):
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            cast("asyncio.Transport", writer.transport).abort()


class Proxy:
    """Passes bytes on to one address.

    Attributes:
        delay_s: what every piece waits, each way.
        jitter_s: what it waits beside, at most; as long as chance has it.
        rate: bytes a second, each way of each connection; None: as fast as it goes.
        accepted: connections so far.
        cuts: connections that were cut.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        """Nothing listens yet."""
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.rate: float | None = None
        self.accepted = 0
        self.cuts = 0
        self._target = target
        self._port = 0  # a free one
        self._flows = asyncio.Event()
        self._flows.set()
        self._to_cut = 0
        self._pairs: set[Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return "127.0.0.1", self._port

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self._port, backlog=4096)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence(self) -> None:
        """A black hole: connections can be made, and nothing is passed on, either way, before `speak`."""
        self._flows.clear()

    def speak(self) -> None:
        """Go on with what was held."""
        self._flows.set()

    def forget(self) -> None:
        """Half-open: the peers of all connections have gone, and those who made them hear nothing for ever."""
        for pair in self._pairs:
            pair.forgotten = True
            cast("asyncio.Transport", pair.far.transport).abort()

    def cut(self, count: int) -> None:
        """Cut so many connections, each as soon as it has something to pass on: in the middle of it."""
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
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            pair = Pair(writer, far_writer)
            self._pairs.add(pair)
            async with asyncio.TaskGroup() as group:
                for source, drain in ((reader, far_writer), (far_reader, writer)):
                    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(AHEAD)
                    group.create_task(self._take(source, due))
                    group.create_task(self._give(pair, due, drain))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side has gone: both go
        finally:
            if pair is not None:
                self._pairs.discard(pair)
                pair.cut()
            cast("asyncio.Transport", writer.transport).abort()

    async def _take(self, source: asyncio.StreamReader, due: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            try:
                data = await source.read(PIECE)
            except OSError:
                data = b""
            await due.put((loop.time() + self.delay_s + random.random() * self.jitter_s, data))

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
                        raise ConnectionResetError  # the near side has given up
                    continue
                await loop.create_future()  # says nothing any more
            if not data:
                raise ConnectionResetError
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
