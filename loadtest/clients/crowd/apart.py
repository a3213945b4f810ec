"""MQTT clients in a process of their own, so that their clocks are not delayed by the load beside them.

`python -m loadtest.clients.crowd.apart HOST PORT ORDER`, an `Order` as JSON. The process writes a line when its
clients are connected, and begins when it reads a line. It ends when its messages are acknowledged, or when its standard
input closes. At QoS 1 it writes two doubles per acknowledged message: when it was due (`time.perf_counter`, which all
processes of a machine share), and its latency in seconds.
"""

from __future__ import annotations

import array
import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import uvloop

from loadtest.beside import beside
from loadtest.clients.connection import Connection, join
from loadtest.clients.mqtt import DISCONNECT, Publisher, packet_id
from loadtest.clients.mqtt_wire import connect_packet, publish_packet
from loadtest.clients.pace import Pace
from loadtest.numbering import Numbering
from loadtest.report import Latencies
from loadtest.start import start_process

ENDLESS: Final = 1 << 40
TICK_S: Final = 0.001
_PAIR: Final = 16  # bytes
_UNREAD_BYTES: Final = 1 << 26  # its output is buffered until it is read


class Order(NamedTuple):
    """What the clients do.

    Attributes:
        topic: of all messages.
        run: the run of the numbered payloads.
        messages: of one publisher at QoS 1.
        size: payload bytes.
        window: its unacknowledged messages.
        rate: messages per second; none: as fast as the window allows.
        greedy: instead, this many clients that send QoS 0 messages as fast as their sockets accept them.
    """

    topic: str
    run: str = "00000000"
    messages: int = ENDLESS
    size: int = 40
    window: int = 1
    rate: float | None = None
    greedy: int = 0


class Apart:
    """The process, and what it has measured so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._seen: array.array[float] = array.array("d")

    @classmethod
    async def start(cls, address: tuple[str, int], order: Order, *, begin: bool = True) -> Self:
        """Start it; return when all its clients are connected. ConnectionError if one cannot connect."""
        process = await start_process(
            sys.executable, "-m", "loadtest.clients.crowd.apart", *map(str, address), json.dumps(order._asdict()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_UNREAD_BYTES,
        )  # fmt: skip
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise ConnectionError("the clients could not connect")
        apart = cls(process)
        if begin:
            apart.begin()
        return apart

    def begin(self) -> None:
        """Have it send."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def answered(self, since: float) -> None:
        """Wait for the PUBACK of a message due after `since` (`time.perf_counter`), so that no slow one is missed."""
        assert self._process.stdout is not None
        while not self._seen or self._seen[-2] < since:
            try:
                self._seen.frombytes(await self._process.stdout.readexactly(_PAIR))
            except asyncio.IncompleteReadError:
                raise ConnectionResetError("the publisher has lost its connection") from None

    async def finished(self) -> None:
        """Wait until all its messages are acknowledged."""
        assert self._process.stdout is not None
        self._seen.frombytes(await self._process.stdout.read())

    @property
    def due_at(self) -> Sequence[float]:
        """When each acknowledged message was due, as far as it was read."""
        return self._seen[0::2]

    def between(self, begin: float, end: float) -> Latencies:
        """Return the latencies of the messages that were due in a period, as far as they were read."""
        found = Latencies()
        found.extend([took for due, took in zip(self.due_at, self._seen[1::2], strict=True) if begin <= due < end])
        return found

    async def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class _Numbered(Sequence[bytes]):
    """The packets of the publisher, each encoded when it is due."""

    def __init__(self, order: Order) -> None:
        self._order, self._numbering = order, Numbering(order.run)

    def __len__(self) -> int:
        return self._order.messages

    def __getitem__(self, place: Any) -> Any:
        topic, size, payload = f"{self._order.topic}/news", self._order.size, self._numbering.payload
        numbers = range(place.start, place.stop)
        return [publish_packet(topic, payload(0, number, size), 1, packet_id(number)) for number in numbers]


class _Timed(Publisher):
    """Writes the latency of each message."""

    def _timed_run(self, first: int, behind: int, now: float) -> None:
        pairs = array.array("d", [value for due in self.due_at[first:behind] for value in (due, now - due)])
        sys.stdout.buffer.write(pairs.tobytes())
        sys.stdout.buffer.flush()


class _Greedy(Connection):
    """Writes the same packet as fast as its socket accepts it."""

    closing = DISCONNECT

    def __init__(self, packet: bytes) -> None:
        super().__init__()
        self.greeting = connect_packet(f"greedy-{secrets.token_hex(4)}", keep_alive_s=0)
        self.connected = self.promise()
        self._packet = packet
        self._writable = True

    def data_received(self, data: bytes) -> None:
        if not self.connected.done():
            self.connected.set_result(None)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self.push()

    def push(self) -> None:
        """Write until the socket is full."""
        while self._writable and self.is_open:
            self.write(self._packet)


async def _publish(address: tuple[str, int], order: Order, parent: asyncio.StreamReader) -> None:
    publisher = _Timed(f"apart-{secrets.token_hex(4)}", _Numbered(order), Pace(order.window, order.rate))
    await publisher.join(address)
    await _begun(parent)
    publisher.start()
    async with beside(parent.read()) as (over,):
        while not publisher.finished.done() and not over.done():
            waiting = (publisher.finished, over)
            tick_s = TICK_S if order.rate else None
            await asyncio.wait(waiting, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
            publisher.push()
    publisher.abandon()


async def _flood(address: tuple[str, int], order: Order, parent: asyncio.StreamReader) -> None:
    packets = [publish_packet(f"{order.topic}/{number}", b"x" * order.size, 0) for number in range(order.greedy)]
    clients = [await join(_Greedy(packet), address) for packet in packets]
    await asyncio.gather(*(one.connected for one in clients))
    await _begun(parent)
    for one in clients:
        one.push()
    await parent.read()


async def _begun(parent: asyncio.StreamReader) -> None:
    print(flush=True)
    await parent.readline()


async def _main(host: str, port: str, text: str) -> None:
    order, parent = Order(**json.loads(text)), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    await (_flood if order.greedy else _publish)((host, int(port)), order, parent)


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:]))
