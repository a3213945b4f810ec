"""Greedy MQTT clients in their own process: they send QoS 0 messages as fast as their sockets accept them.

`python -m loadtest.clients.crowd.greedy HOST PORT TOPIC CONNECTIONS BYTES` writes a line when all are connected, and
ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from functools import partial
from typing import Self, cast

import uvloop

from loadtest.clients.mqtt_wire import connect_packet, publish_packet
from loadtest.start import start_process


class Greedy:
    """The process of the greedy clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: tuple[str, int], topic: str, connections: int, size: int) -> Self:
        """Start the process; return when all clients are connected."""
        host, port = address
        process = await start_process(
            sys.executable, "-m", "loadtest.clients.crowd.greedy", host, str(port), topic, str(connections), str(size),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise ConnectionError("the greedy clients could not connect")
        return cls(process)

    async def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class _Connection(asyncio.Protocol):
    """One greedy client."""

    def __init__(self, packet: bytes) -> None:
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._packet = packet
        self._transport: asyncio.Transport | None = None
        self._writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
        self._transport.write(connect_packet(f"greedy-{secrets.token_hex(4)}", keep_alive_s=0))

    def data_received(self, data: bytes) -> None:
        if not self.connected.done():
            self.connected.set_result(None)
            self._send()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        while self._writable and not self._transport.is_closing():
            self._transport.write(self._packet)


async def _flood(host: str, port: int, topic: str, connections: int, size: int) -> None:
    loop = asyncio.get_running_loop()
    made: list[_Connection] = []
    for number in range(connections):
        packet = publish_packet(f"{topic}/{number}", b"x" * size, 0)
        made.append(_Connection(packet))
        await loop.create_connection(partial(made.__getitem__, number), host, port)
    await asyncio.gather(*(one.connected for one in made))
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run(_flood(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
