"""A small TCP balancer: who is ready gets the next connection, with its client's address by the PROXY protocol (v2)."""

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
CHECK_S: Final = 0.1  # between two checks of a gateway
CHECKED_S: Final = 2.0  # for its answer
CONNECT_S: Final = 2.0
HOST: Final = "127.0.0.1"


class Side(asyncio.Protocol):
    """One of the two sockets of a connection: what it reads the other writes, as fast as that goes."""

    def __init__(self, opened: Callable[[Side], None] | None = None) -> None:
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None
        self._opened = opened
        self._early: list[bytes] = []  # what came before there was another side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self.transport = cast("asyncio.Transport", transport)
        if self._opened is not None:
            self._opened(self)

    def join(self, other: Side) -> None:
        """From now on they are one connection."""
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
        """Pass it on."""
        if self.other is None:
            self._early.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """The other side hears it, and may still answer."""
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        """This side's peer reads slowly."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Both end."""
        self.transport = None
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Behind what is written."""
        if self.transport is not None:
            self.transport.close()


class Balancer:
    """Listens for each protocol, and knows which gateways are ready; see `balancing`.

    Attributes:
        ready: by gateway, since its last check.
        connects: when clients have connected, in seconds of `time.monotonic`.
        refused: connections that no gateway has taken.
    """

    def __init__(
        self, gateways: Sequence[Mapping[str, tuple[str, int]]], protocols: Sequence[str], group: asyncio.TaskGroup
    ) -> None:
        """`gateways`: the address of each by listener, `management` among them."""
        self.ready = [False] * len(gateways)
        self.connects: list[float] = []
        self.refused = 0
        self._gateways = gateways
        self._protocols = protocols
        self._turn = itertools.count()
        self._servers: dict[str, asyncio.Server] = {}
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()  # of the group, that have not ended

    async def start(self) -> None:
        """Listen, and check."""
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
        """Listen and check no more."""
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()

    def address(self, protocol: str) -> tuple[str, int]:
        """Where clients of a protocol connect."""
        return cast("tuple[str, int]", self._servers[protocol].sockets[0].getsockname()[:2])

    async def _connect(self, client: Side, protocol: str) -> None:
        """Give a client to the next gateway that is ready and takes it."""
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
        """Ask a gateway again and again whether it is ready."""
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
    """A balancer that listens; whatever it does ends with the block."""
    async with asyncio.TaskGroup() as group:
        balancer = Balancer(gateways, protocols, group)
        await balancer.start()
        try:
            yield balancer
        finally:
            balancer.stop()


def _header(client: asyncio.Transport) -> bytes:
    """Whose the connection is: PROXY version 2, TCP over IPv4."""
    source, here = client.get_extra_info("peername"), client.get_extra_info("sockname")
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(here[0]) + struct.pack(">HH", source[1], here[1])
    return SIGNATURE + struct.pack(">BBH", 0x21, 0x11, len(addresses)) + addresses
