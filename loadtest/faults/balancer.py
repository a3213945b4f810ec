"""A small TCP load balancer: connects clients to ready gateways, and sends their address by PROXY protocol v2."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
CHECK_S: Final = 0.1  # interval of a gateway's checks
CHECKED_S: Final = 2.0  # timeout of a check
CONNECT_S: Final = 2.0
HOST: Final = "127.0.0.1"


class Side(asyncio.Protocol):
    """One socket of a proxied connection: writes what the other side reads, with back-pressure."""

    def __init__(self, opened: Callable[[Side], None] | None = None) -> None:
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None
        self._opened = opened
        self._early: list[bytes] = []  # data received before `join`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport, and report the new connection."""
        self.transport = cast("asyncio.Transport", transport)
        if self._opened is not None:
            self._opened(self)

    def join(self, other: Side) -> None:
        """Connect two sides."""
        self.other, other.other = other, self
        for one in (self, other):
            if one.transport is None or one.transport.is_closing():
                self.close()
                other.close()
                return
        for one in (self, other):
            early, one._early = one._early, []
            for data in early:
                one.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Forward the data."""
        if self.other is None:
            self._early.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Forward the end of the stream; the other side may still answer."""
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        """Stop reading on the other side, because this side's peer reads slowly."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again on the other side."""
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close both sides."""
        self.transport = None
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Close the socket after the pending writes."""
        if self.transport is not None:
            self.transport.close()


class Balancer:
    """Listens for each protocol, and checks which gateways are ready; see `balancing`.

    Attributes:
        ready: whether each gateway was ready at its last check.
        connects: when clients connected, in seconds of `time.monotonic`.
        refused: connections that no gateway accepted.
    """

    def __init__(
        self, gateways: Sequence[Mapping[str, tuple[str, int]]], protocols: Sequence[str], group: asyncio.TaskGroup
    ) -> None:
        """`gateways` has each gateway's addresses by listener, including `management`."""
        self.ready = [False] * len(gateways)
        self.connects: list[float] = []
        self.refused = 0
        self._gateways = gateways
        self._protocols = protocols
        self._turn = itertools.count()
        self._servers: dict[str, asyncio.Server] = {}
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()  # running tasks of the group

    async def start(self) -> None:
        """Start to listen and to check."""
        loop = asyncio.get_running_loop()
        for protocol in self._protocols:

            def opened(side: Side, protocol: str = protocol) -> None:
                self._spawn(self._connect(side, protocol))

            self._servers[protocol] = await loop.create_server(lambda opened=opened: Side(opened), HOST, 0)  # type: ignore[misc]
        for number in range(len(self._gateways)):
            self._spawn(self._check(number))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Stop listening and checking."""
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()

    def address(self, protocol: str) -> tuple[str, int]:
        """Return the address for clients of a protocol."""
        return cast("tuple[str, int]", self._servers[protocol].sockets[0].getsockname()[:2])

    async def _connect(self, client: Side, protocol: str) -> None:
        """Connect a client to the next ready gateway that accepts."""
        self.connects.append(time.monotonic())
        first = next(self._turn)
        order = [(first + number) % len(self._gateways) for number in range(len(self._gateways))]
        for number in order:
            if not self.ready[number]:
                continue
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, side = await asyncio.get_running_loop().create_connection(
                        Side, *self._gateways[number][protocol]
                    )
            except (OSError, TimeoutError):
                continue
            if side.transport is None or client.transport is None:
                side.close()
                return
            side.transport.write(_header(client.transport))
            client.join(side)
            return
        self.refused += 1
        client.close()

    async def _check(self, number: int) -> None:
        """Check repeatedly whether a gateway is ready."""
        while True:
            try:
                async with asyncio.timeout(CHECKED_S):
                    self.ready[number] = await _is_ready(self._gateways[number]["management"])
            except (OSError, TimeoutError):
                self.ready[number] = False
            await asyncio.sleep(CHECK_S)


async def _is_ready(address: tuple[str, int]) -> bool:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read(12)).endswith(b" 200")
    finally:
        writer.close()


@asynccontextmanager
async def balancing(
    gateways: Sequence[Mapping[str, tuple[str, int]]], protocols: Sequence[str]
) -> AsyncIterator[Balancer]:
    """Run a balancer during the block."""
    async with asyncio.TaskGroup() as group:
        balancer = Balancer(gateways, protocols, group)
        await balancer.start()
        try:
            yield balancer
        finally:
            balancer.stop()


def _header(client: asyncio.Transport) -> bytes:
    """Return a PROXY header, version 2, TCP over IPv4, with the client's address."""
    source, here = client.get_extra_info("peername"), client.get_extra_info("sockname")
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(here[0]) + struct.pack(">HH", source[1], here[1])
    return SIGNATURE + struct.pack(">BBH", 0x21, 0x11, len(addresses)) + addresses
