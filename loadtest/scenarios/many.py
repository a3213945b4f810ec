"""Scenario `many`: drives everything that a client can have many of to its limit, and ends it, beside a modest client.

The modest client is a process that publishes one QoS 1 message after the other; nothing may delay its PUBACK for long.
The result also has the slow event-loop turns (in CPU time) that the gateway's watchdog saw. `many_held` drives the
things that a client holds.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import aiohttp

from loadtest.clients.amqp_wire import ATTACH, TRUE, frame, performative, uint
from loadtest.clients.modest import Modest
from loadtest.clients.mqtt_wire import (
    connect_packet,
    packet,
    subscribe_packet,
    text,
    varint,
)
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_cpu
from loadtest.numbering import Numbering
from loadtest.report import Latencies
from loadtest.scenarios.many_held import Held, Wire, receiver, sender

SETTINGS: Final = {
    "TRIVIUM_AMQP__LINKS_PER_SESSION": "20000",
    "TRIVIUM_MQTT__MAX_SUBSCRIPTIONS": "20000",
    "TRIVIUM_MQTT__OUTGOING_INFLIGHT": "65535",
    "TRIVIUM_HTTP__MAX_BODY_BYTES": "16777216",
}
"""Limits above the defaults: an operator's larger limits must not let one client stop the others."""

TURN_S: Final = 0.25  # the longest turn that is allowed
WAIT_S: Final = 60.0
SLOW: Final = "trivium_event_loop_slow_turn_seconds_count"
LONGEST: Final = "trivium_event_loop_longest_turn_seconds"


class Plan(NamedTuple):
    """The number of each; `quiet` is the pause in seconds around each; `only` selects by name."""

    links: int = 10_000
    receivers: int = 500
    filters: int = 5_000
    retained: int = 5_000
    records: int = 10_000
    connections: int = 1_000
    sessions: int = 1_000
    subscriptions: int = 256
    held: int = 5_000
    groups: int = 16
    transactions: int = 1_000
    flight: int = 65_535
    streams: int = 2_000
    consumers: int = 1_000
    quiet: float = 1.0
    only: str = ""


class Beside(NamedTuple):
    """The effect of one part on the modest client and on the gateway; `longest` and `cpu` in seconds."""

    name: str
    number: int
    latencies: Latencies
    slow: int
    longest: float
    cpu: float

    def row(self) -> dict[str, float | int | str]:
        """Return a row of a report."""
        return {
            "many": self.name,
            "number": self.number,
            "modest client's p50 ms": self.latencies.milliseconds(50),
            "p99 ms": self.latencies.milliseconds(99),
            "most ms": self.latencies.milliseconds(100),
            "turns over 0.1 s": self.slow,
            "longest turn so far, s": self.longest,
            "gateway cpu s": round(self.cpu, 2),
        }


class Many:
    """One run."""

    def __init__(self, gateway: GatewayProcess, plan: Plan) -> None:
        self._gateway = gateway
        self._plan = plan
        self._run = Numbering().run
        self._topic = f"many-{self._run}"
        self._held = Held(gateway, self._run, self._topic, plan.quiet)

    async def measure(self) -> list[Beside]:
        """Run each part in turn."""
        plan, held = self._plan, self._held
        manys: list[tuple[str, int, Callable[[int], Awaitable[None]]]] = [
            ("AMQP: senders of a connection that breaks", plan.links, self._senders),
            (
                "AMQP: receivers of a connection that breaks",
                plan.receivers,
                self._receivers,
            ),
            ("AMQP: links of a session that ends", plan.links, self._session),
            ("AMQP: links detached in one breath", plan.links, self._detached),
            (
                "AMQP: receivers of a topic, detached one by one",
                plan.held,
                held.receivers,
            ),
            ("AMQP: receivers of a topic that drain at once", plan.held, held.drained),
            ("AMQP: members of one group, detached one by one", plan.held, held.queue),
            ("AMQP: receivers of as many groups", plan.groups, held.groups),
            (
                "AMQP: open transactions of a connection that breaks",
                plan.transactions,
                held.transactions,
            ),
            (
                "MQTT: filters of one SUBSCRIBE, then the end",
                plan.filters,
                self._filters,
            ),
            ("MQTT: user properties of one PUBLISH", plan.filters, self._properties),
            ("MQTT: subscriptions, a packet for each", plan.held, held.subscribes),
            ("MQTT: shared subscriptions of one group", plan.held, held.shared),
            ("MQTT: packet ids in flight, QoS 1", plan.flight, held.in_flight_1),
            ("MQTT: packet ids in flight, QoS 2", plan.flight, held.in_flight_2),
            ("MQTT: retained messages for one filter", plan.retained, self._retained),
            (
                "MQTT: connections with wills that break at once",
                plan.connections,
                self._wills,
            ),
            ("MQTT: kept sessions that end at once", plan.sessions, self._sessions),
            ("HTTP: records of one request", plan.records, self._records),
            (
                "HTTP: subscriptions of a WebSocket that ends",
                plan.subscriptions,
                self._subscriptions,
            ),
            (
                "HTTP: event streams of a topic that break at once",
                plan.streams,
                held.streams,
            ),
            (
                "HTTP: WebSockets of a topic that break at once",
                plan.streams,
                held.sockets,
            ),
            ("HTTP: consumer instances", plan.consumers, held.consumers),
        ]
        await create_topic(self._gateway.kafka, self._topic)
        found: list[Beside] = []
        modest = await Modest.start(*self._gateway.address("mqtt"), self._topic)
        try:
            for name, count, drive in manys:
                if plan.only in name:
                    found.append(await self._beside(modest, name, count, drive))
        finally:
            await modest.stop()
        return found

    async def _beside(
        self,
        modest: Modest,
        name: str,
        count: int,
        drive: Callable[[int], Awaitable[None]],
    ) -> Beside:
        """Run one part, and measure its effect on the modest client and the watchdog."""
        await asyncio.sleep(self._plan.quiet)
        cpu, (slow, _) = process_cpu(self._gateway.pid), await self._turns()
        begin = time.monotonic()
        await drive(count)
        await asyncio.sleep(self._plan.quiet)  # include its aftermath
        end = time.monotonic()
        await modest.answered(end)
        behind, longest = await self._turns()
        cpu = process_cpu(self._gateway.pid) - cpu
        return Beside(name, count, modest.between(begin, end), behind - slow, longest, cpu)

    # the watchdog

    async def _turns(self) -> tuple[int, float]:
        """Return the number of slow turns in the gateway, and its longest one in seconds."""
        metrics = await self._gateway.metrics()
        return int(metrics.get(SLOW, 0)), metrics.get(LONGEST, 0.0)

    # AMQP

    async def _attached(self, count: int, *, receive: bool = False) -> asyncio.StreamWriter:
        """Open a connection with `count` attached links."""
        wire = await Wire.open(self._gateway.address("amqp"), f"{self._run}-links")
        attach = receiver if receive else sender
        await wire.ask([attach(number, self._topic) for number in range(count)], ATTACH)
        return wire.writer

    async def _senders(self, count: int) -> None:
        (await self._attached(count)).transport.abort()

    async def _receivers(self, count: int) -> None:
        (await self._attached(count, receive=True)).transport.abort()

    async def _session(self, count: int) -> None:
        writer = await self._attached(count)
        writer.write(frame(performative(0x17)))
        await writer.drain()
        await asyncio.sleep(self._plan.quiet)
        writer.transport.abort()

    async def _detached(self, count: int) -> None:
        writer = await self._attached(count)
        writer.write(b"".join(frame(performative(0x16, uint(number), TRUE)) for number in range(count)))
        await writer.drain()
        await asyncio.sleep(self._plan.quiet)
        writer.transport.abort()

    # MQTT

    async def _mqtt(self, connect: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect and wait for CONNACK."""
        reader, writer = await asyncio.open_connection(*self._gateway.address("mqtt"), limit=1 << 22)
        writer.write(connect)
        first, _ = await _next(reader)
        assert first == 0x20, f"0x{first:02x}"
        return reader, writer

    async def _filters(self, count: int) -> None:
        reader, writer = await self._mqtt(connect_packet(f"{self._run}-filters"))
        writer.write(subscribe_packet(1, [(f"{self._topic}/{number}/+", 1) for number in range(count)]))
        first, _ = await _next(reader)
        assert first == 0x90, f"0x{first:02x}"
        writer.transport.abort()

    async def _properties(self, count: int) -> None:
        reader, writer = await self._mqtt(connect_packet(f"{self._run}-properties"))
        properties = b"".join(b"\x26" + text(f"name-{number}") + text("value") for number in range(count))
        body = text(f"{self._topic}/properties") + struct.pack(">H", 1) + varint(len(properties)) + properties + b"x"
        writer.write(packet(0x32, body))
        first, _ = await _next(reader)
        assert first == 0x40, f"0x{first:02x}"
        writer.close()

    async def _retained(self, count: int) -> None:
        reader, writer = await self._mqtt(connect_packet(f"{self._run}-retained"))
        place = f"{self._topic}/kept"
        for first in range(0, count, 50):
            for number in range(first, min(count, first + 50)):
                payload = text(f"{place}/{number}") + struct.pack(">H", number - first + 1) + b"\0x"
                writer.write(packet(0x33, payload))
            for _ in range(first, min(count, first + 50)):
                await _next(reader)
        writer.write(subscribe_packet(1000, [(f"{place}/#", 0)]))
        got = 0
        while got < count:
            first, _ = await _next(reader)
            got += first >> 4 == 3
        writer.close()

    async def _wills(self, count: int) -> None:
        def connect(number: int) -> bytes:
            body = text("MQTT") + bytes((5, 0x02 | 0x04 | 0x08)) + struct.pack(">H", 60) + b"\0"
            body += text(f"{self._run}-will-{number}") + b"\0" + text(f"{self._topic}/will") + text("gone")
            return packet(0x10, body)

        await self._crowd([connect(number) for number in range(count)])

    async def _sessions(self, count: int) -> None:
        """Create sessions that expire after a second, all left at the same moment."""
        await self._crowd([
            connect_packet(f"{self._run}-kept-{number}", session_expiry_s=1) for number in range(count)
        ])  # fmt: skip
        await asyncio.sleep(3.0)

    async def _crowd(self, connects: list[bytes]) -> None:
        """Open connections and abort them together."""
        writers: list[asyncio.StreamWriter] = []
        for first in range(0, len(connects), 50):
            made = await asyncio.gather(*(self._mqtt(connect) for connect in connects[first : first + 50]))
            writers += [writer for _, writer in made]
        for writer in writers:
            writer.transport.abort()

    # HTTP

    async def _records(self, count: int) -> None:
        host, port = self._gateway.address("http")
        body = json.dumps({"records": [{"key": str(number), "value": {"n": number}} for number in range(count)]})
        headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://{host}:{port}/topics/{self._topic}", data=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
            await answer.read()

    async def _subscriptions(self, count: int) -> None:
        host, port = self._gateway.address("http")
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(f"http://{host}:{port}/stream", protocols=["trivium.v1"]) as socket,
        ):
            for number in range(count):
                await socket.send_json(
                    {
                        "type": "subscribe",
                        "id": str(number),
                        "topic": self._topic,
                        "credit": 1,
                    }
                )
            answers: dict[str, Any] = {}
            while len(answers) < count:
                answer = await socket.receive_json(timeout=WAIT_S)
                if answer["type"] != "record":
                    answers[answer["id"]] = answer


def check(found: list[Beside]) -> list[str]:
    """Return the parts that delayed others by a long turn of the gateway's loop, in CPU time."""
    problems: list[str] = []
    before = 0.0
    for one in found:
        if one.longest > max(before, TURN_S):
            problems.append(f"{one.name}: a turn of {one.longest:.2f} s")
        before = one.longest
    return problems


async def _next(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the next MQTT packet."""
    async with asyncio.timeout(WAIT_S):
        first = (await reader.readexactly(1))[0]
        length, shift = 0, 0
        while True:
            byte = (await reader.readexactly(1))[0]
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return first, await reader.readexactly(length)
