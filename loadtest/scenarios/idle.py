"""Scenario `idle`: measures the cost of connected but silent clients, from 1,000 connections on.

Each client has its own subscription and pings according to its Keep Alive. At every size the gateway's memory and idle
CPU are measured, its metrics are scraped, and one publisher sends to one of the clients.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import aiohttp

from loadtest.beside import beside, in_turn
from loadtest.clients.joining import C, join
from loadtest.clients.mqtt import Publisher, publishes
from loadtest.clients.mqtt_wire import Splitter, connect_packet, subscribe_packet
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic
from loadtest.gateway import loop_cpu, process_cpu, process_resident
from loadtest.numbering import Numbering
from loadtest.scenarios.memory import Scales

ADDRESS_PORTS: Final = 1_000  # connections per local address: finding a port is slow when many are used
SPARE_FILES: Final = 500  # for the gateway's connections to Kafka, listeners and reserve
SCRAPES: Final = 5
TICK_S: Final = 0.02
PATIENCE_S: Final = 60.0
GOLDEN: Final = 0.618034  # its multiples, modulo 1, are spread evenly however many there are
PINGREQ: Final = b"\xc0\x00"


class Plan(NamedTuple):
    """Parameters of the largest size and of the measurements.

    Attributes:
        connections: the largest size; each size is ten times the one before, starting with `least`.
        least: the first size.
        at_once: connections opened at the same time.
        keep_alive: seconds; each client pings once in it.
        watch: seconds of silence in which CPU is measured.
        messages: to one client, at QoS 1, 100 in flight.
        settle: pause in seconds before memory is measured.
    """

    connections: int = 50_000
    least: int = 1_000
    at_once: int = 200
    keep_alive: int = 60
    watch: float = 20.0
    messages: int = 20_000
    settle: float = 3.0

    @property
    def sizes(self) -> list[int]:
        """The sizes in ascending order."""
        sizes, size = [], min(self.least, self.connections)
        while size < self.connections:
            sizes.append(size)
            size *= 10
        return [*sizes, self.connections]


def fitting(plan: Plan) -> Plan:
    """Return the plan, limited to the connections that the open files of this process and the gateway allow."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return plan._replace(connections=min(plan.connections, limit - SPARE_FILES))


class Silent(asyncio.Protocol):
    """A connected client with one subscription that counts and acknowledges its messages.

    Attributes:
        ready: done after SUBACK.
        received: number of messages.
    """

    __slots__ = ("_data", "_splitter", "ready", "received", "transport")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._splitter: Splitter | None = None
        self.transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] | None = asyncio.get_running_loop().create_future()
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT and SUBSCRIBE together."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._data)
        self._data = b""

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK, SUBACK, PINGRESP and PUBLISH."""
        if self._splitter is None:  # saves memory in fifty thousand silent clients
            self._splitter = Splitter()
        acknowledged = bytearray()
        for first, body in self._splitter.feed(data):
            if first == 0x20 and body[1]:
                self.connection_lost(ConnectionRefusedError(f"CONNACK 0x{body[1]:02x}"))
            elif first == 0x90 and self.ready is not None:
                self.ready.set_result(None)
                self.ready = None
            elif first & 0xF0 == 0x30:
                self.received += 1
                at = 2 + int.from_bytes(body[:2])
                acknowledged += b"\x40\x02" + body[at : at + 2]
        if acknowledged and self.transport is not None:
            self.transport.write(bytes(acknowledged))
        if self._splitter.is_empty:
            self._splitter = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail `ready` before SUBACK."""
        self.transport = None
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(exc or ConnectionResetError("closed before SUBACK"))


class Idle:
    """One run, on a gateway with enough open files."""

    def __init__(self, gateway: Scales, management: tuple[str, int], plan: Plan, say: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._management = management
        self._plan = plan
        self._say = say
        self._topic = f"idle-{Numbering().run}"
        self._clients: dict[int, Silent] = {}  # by number
        self._pings: list[tuple[float, int]] = []  # a heap: when each client is due

    async def measure(self) -> list[dict[str, Any]]:
        """Return a row for each size."""
        await create_topic(self._gateway.kafka, self._topic)
        await self._connect(0)
        await self._publish()  # warm up
        await asyncio.sleep(self._plan.settle)
        empty = process_resident(self._gateway.pid)
        rows = []
        async with beside(self._ping()):
            for size in self._plan.sizes:
                row = {"connections": size, **await self._grow(size), **await self._watch()}
                row["bytes each"] = round((process_resident(self._gateway.pid) - empty) / size)
                row |= await self._scrape()
                row |= await self._publish()
                row["gone"] = sum(one.transport is None for one in self._clients.values())
                self._say(str(row))
                rows.append(row)
        for one in self._clients.values():
            if one.transport is not None:
                one.transport.abort()
        return rows

    async def _grow(self, size: int) -> dict[str, Any]:
        """Connect until there are `size` clients."""
        before, began, used = len(self._clients), time.perf_counter(), process_cpu(self._gateway.pid)
        await in_turn(range(before, size), self._connect, self._plan.at_once)
        count = max(1, size - before)
        return {
            "connects per second": round(count / (time.perf_counter() - began)),
            "cpu us of each": round((process_cpu(self._gateway.pid) - used) / count * 1e6),
        }

    async def _connect(self, number: int) -> None:
        name = f"{self._topic}-{number}"
        data = connect_packet(name, keep_alive_s=self._plan.keep_alive)
        data += subscribe_packet(1, [(f"{self._topic}/{number}", 1)])
        async with asyncio.timeout(PATIENCE_S):
            client = await self.open(Silent(data), number)
            if client.ready is not None:
                await client.ready
        self._clients[number] = client
        first = time.perf_counter() + number * GOLDEN % 1 * self._plan.keep_alive  # all sizes ping at a steady rate
        heapq.heappush(self._pings, (first, number))

    async def _watch(self) -> dict[str, Any]:
        """Measure CPU with only pings."""
        await asyncio.sleep(self._plan.settle)
        used, began = loop_cpu(self._gateway.pid), time.perf_counter()
        await asyncio.sleep(self._plan.watch)
        used, took = loop_cpu(self._gateway.pid) - used, time.perf_counter() - began
        return {"idle cpu %": round(used / took * 100, 2)}

    async def _ping(self) -> None:
        """Ping for each client once per Keep Alive, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            while self._pings and self._pings[0][0] <= now:
                due, number = self._pings[0]
                heapq.heapreplace(self._pings, (due + self._plan.keep_alive, number))
                transport = self._clients[number].transport
                if transport is not None:
                    transport.write(PINGREQ)

    async def open(self, client: C, number: int) -> C:
        """Connect client `number`, from one of several local addresses, since each has a limited number of ports."""
        return await join(client, self._gateway.address, local_addr=(f"127.0.1.{number // ADDRESS_PORTS}", 0))

    async def metrics(self) -> bytes:
        """Return the metrics."""
        host, port = self._management
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as answer:
            return await answer.read()

    async def _scrape(self) -> dict[str, Any]:
        took, size = [], 0
        for _ in range(SCRAPES):
            began = time.perf_counter()
            size = len(await self.metrics())
            took.append(time.perf_counter() - began)
        return {"/metrics ms": round(statistics.median(took) * 1000, 1), "its KiB": round(size / 1024)}

    async def _publish(self) -> dict[str, Any]:
        """Measure the cost of messages from one publisher to one of the clients."""
        number = len(self._clients) // 2
        client, plan = self._clients[number], self._plan
        wanted = client.received + plan.messages
        packets = publishes(f"{self._topic}/{number}", [b"%0100d" % one for one in range(plan.messages)])
        publisher = await self.open(Publisher(f"{self._topic}-publisher", packets, Pace(100, None)), 0)
        await publisher.connected
        used, began = process_cpu(self._gateway.pid), time.perf_counter()
        publisher.start()
        await publisher.finished
        async with asyncio.timeout(PATIENCE_S):
            while client.received < wanted:  # noqa: ASYNC110 - counted in the client's own data_received
                await asyncio.sleep(TICK_S)
        used, took = process_cpu(self._gateway.pid) - used, time.perf_counter() - began
        publisher.close()
        return {
            "cpu us/msg": round(used / plan.messages * 1e6, 1),
            "messages per second": round(plan.messages / took),
            "PUBACK p99 ms": publisher.latencies.milliseconds(99),
        }
