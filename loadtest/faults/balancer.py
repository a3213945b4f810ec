"""A small TCP load balancer: connects clients to ready gateways, and sends their address by PROXY protocol v2."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from loadtest.beside import beside
from loadtest.faults.proxy import Peer, Proxy

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
CHECK_S: Final = 0.1  # interval of a gateway's checks
CHECKED_S: Final = 2.0  # timeout of a check
CONNECT_S: Final = 2.0


class Balancer:
    """Listens for each protocol, and checks which gateways are ready; see `balancing`.

    Attributes:
        ready: whether each gateway was ready at its last check.
        connects: when clients connected, in seconds of `time.monotonic`.
        refused: connections that no gateway accepted.
    """

    def __init__(self, gateways: Sequence[Mapping[str, tuple[str, int]]], protocols: Sequence[str]) -> None:
        """`gateways` has each gateway's addresses by listener, including `management`."""
        self.ready = [False] * len(gateways)
        self.connects: list[float] = []
        self.refused = 0
        self.entrances = {protocol: Proxy(partial(self._reach, protocol)) for protocol in protocols}
        self._gateways = gateways
        self._turn = itertools.count()

    def address(self, protocol: str) -> tuple[str, int]:
        """Return the address for clients of a protocol."""
        return self.entrances[protocol].address

    async def _reach(self, protocol: str, client: asyncio.StreamWriter) -> Peer:
        """Connect a client to the next ready gateway that accepts; ConnectionRefusedError if none does."""
        self.connects.append(time.monotonic())
        first = next(self._turn)
        for number in range(first, first + len(self._gateways)):
            gateway = number % len(self._gateways)
            if not self.ready[gateway]:
                continue
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(*self._gateways[gateway][protocol])
            except (OSError, TimeoutError):
                continue
            writer.write(_header(client))
            return reader, writer
        self.refused += 1
        raise ConnectionRefusedError("no gateway is ready")

    async def check(self, number: int) -> None:
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
    balancer = Balancer(gateways, protocols)
    async with beside(*map(balancer.check, range(len(gateways)))):
        try:
            for entrance in balancer.entrances.values():
                await entrance.start()
            yield balancer
        finally:
            for entrance in balancer.entrances.values():
                await entrance.stop()


def _header(client: asyncio.StreamWriter) -> bytes:
    """Return a PROXY header, version 2, TCP over IPv4, with the client's address."""
    source, here = client.get_extra_info("peername"), client.get_extra_info("sockname")
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(here[0]) + struct.pack(">HH", source[1], here[1])
    return SIGNATURE + struct.pack(">BBH", 0x21, 0x11, len(addresses)) + addresses
