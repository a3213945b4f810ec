"""Drivers for `many` of what a client can hold: transactions, group members, messages in flight, streams, consumers."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp

from loadtest.beside import beside
from loadtest.clients.amqp_wire import (
    ATTACH,
    DETACH,
    DISPOSITION,
    FALSE,
    FLOW,
    GREETING,
    NULL,
    SASL_OUTCOME,
    TRUE,
    ZERO,
    Splitter,
    frame,
    listed,
    opening,
    performative,
    read_value,
    string,
    symbols,
    transfer,
    uint,
)
from loadtest.clients.mqtt_wire import Splitter as Packets
from loadtest.clients.mqtt_wire import connect_packet, packet, publish_packet, subscribe_packet
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess

WAIT_S: Final = 120.0
KAFKA_JSON: Final = {"Content-Type": "application/vnd.kafka.v2+json"}
_COORDINATOR: Final = b"\x00\x53\x30" + listed([symbols(["amqp:local-transactions"])])
_DECLARE: Final = b"\x00\x53\x77\x00\x53\x31\x45"  # an amqp-value


class Wire:
    """A plain AMQP connection with one session."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._frames = Splitter()
        self._codes: list[int] = []

    @classmethod
    async def open(cls, address: tuple[str, int], container: str) -> Wire:
        """Connect, log in and open."""
        wire = cls(*await asyncio.open_connection(*address))
        wire.writer.write(GREETING)
        await wire.answers(SASL_OUTCOME, 1)
        wire.writer.write(opening(container))
        return wire

    async def answers(self, code: int, count: int) -> None:
        """Wait for `count` performatives of a kind."""
        async with asyncio.timeout(WAIT_S):
            while self._codes.count(code) < count:
                data = await self._reader.read(1 << 20)
                if not data:
                    raise ConnectionResetError("the gateway closed the connection")
                for body in self._frames.feed(data):
                    (found, _), _ = read_value(body, 0)
                    self._codes.append(found)

    async def ask(self, frames: list[bytes], code: int) -> None:
        """Send frames, and wait for a response to each, concurrently like a client library."""

        async def say() -> None:
            for first in range(0, len(frames), 200):
                self.writer.write(b"".join(frames[first : first + 200]))
                await self.writer.drain()

        before = self._codes.count(code)
        async with beside(say()):
            await self.answers(code, before + len(frames))


def receiver(handle: int, address: str, *capabilities: str, group: str = "") -> bytes:
    """Return the attach of a receiver link."""
    terms = [string(address + (f"/group.id/{group}" if group else "")), *[NULL] * 9]
    source = b"\x00\x53\x28" + listed([*terms, symbols(capabilities) if capabilities else NULL])
    target = b"\x00\x53\x29" + listed([string("me")])
    return frame(
        performative(
            ATTACH,
            string(f"held-{handle}"),
            uint(handle),
            TRUE,
            NULL,
            NULL,
            source,
            target,
        )
    )


def sender(handle: int, address: str) -> bytes:
    """Return the attach of a sender link."""
    source, target = b"\x00\x53\x28" + listed([string("me")]), b"\x00\x53\x29" + listed([string(address)])
    terms = (string(f"held-{handle}"), uint(handle), FALSE, NULL, NULL, source, target, NULL, NULL, ZERO)
    return frame(performative(ATTACH, *terms))


def detach(handle: int) -> bytes:
    """Return the detach of a link."""
    return frame(performative(DETACH, uint(handle), TRUE))


def drain(handle: int, delivery_count: int) -> bytes:
    """Return a flow with 10 credits and drain (part 2.6.7)."""
    counts = (*[uint(number) for number in (0, 2048, 0, 2048, handle, delivery_count, 10)], NULL, TRUE)
    return frame(performative(FLOW, *counts))


class Held:
    """The drivers; each creates `count` of something and releases them."""

    def __init__(self, gateway: GatewayProcess, run: str, topic: str, quiet: float) -> None:
        self._gateway = gateway
        self._run = run
        self._topic = topic
        self._quiet = quiet

    # AMQP

    async def receivers(self, count: int) -> None:
        """Receivers of one topic, detached one by one while they are behind."""
        await self._receivers([receiver(number, self._topic) for number in range(count)])

    async def drained(self, count: int) -> None:
        """Receivers of one silent topic that all drain together, twice."""
        silent = f"{self._topic}-silent"
        await create_topic(self._gateway.kafka, silent)
        wire = await Wire.open(self._gateway.address("amqp"), f"{self._run}-drained")
        await wire.ask([receiver(number, silent) for number in range(count)], ATTACH)
        for delivery_count in (0, 10):
            await wire.ask([drain(number, delivery_count) for number in range(count)], FLOW)
        wire.writer.transport.abort()

    async def queue(self, count: int) -> None:
        """Receivers of one queue: members of one consumer group."""
        await self._receivers([receiver(number, self._topic, "queue") for number in range(count)])

    async def groups(self, count: int) -> None:
        """Receivers of as many consumer groups."""
        attaches = [receiver(number, self._topic, group=f"{self._run}-g{number}") for number in range(count)]
        await self._receivers(attaches)

    async def _receivers(self, attaches: list[bytes]) -> None:
        wire = await Wire.open(self._gateway.address("amqp"), f"{self._run}-held")
        await wire.ask(attaches, ATTACH)
        await asyncio.sleep(self._quiet)
        await wire.ask([detach(number) for number in range(len(attaches))], DETACH)
        wire.writer.transport.abort()

    async def transactions(self, count: int) -> None:
        """Open transactions of a connection that breaks."""
        wire = await Wire.open(self._gateway.address("amqp"), f"{self._run}-transactions")
        source = b"\x00\x53\x28" + listed([string("me")])
        items = (
            string("coordinator"),
            ZERO,
            FALSE,
            NULL,
            NULL,
            source,
            _COORDINATOR,
            NULL,
            NULL,
            ZERO,
        )
        await wire.ask([frame(performative(ATTACH, *items))], ATTACH)
        for first in range(0, count, 10):  # within the link's credit
            numbers = range(first, min(count, first + 10))
            await wire.ask(
                [transfer(number, b"%d" % number, _DECLARE) for number in numbers],
                DISPOSITION,
            )
        await asyncio.sleep(self._quiet)
        wire.writer.transport.abort()

    # MQTT

    async def subscribes(self, count: int) -> None:
        """Subscriptions of one client, with one packet each."""
        reader, writer = await self._mqtt(connect_packet(f"{self._run}-subscribes"))
        for number in range(count):
            writer.write(subscribe_packet(number % 65535 + 1, [(f"{self._topic}/{number}/+", 1)]))
        await _packets(reader, 0x90, count)
        writer.transport.abort()

    async def shared(self, count: int) -> None:
        """Shared subscriptions of one client in one group."""
        reader, writer = await self._mqtt(connect_packet(f"{self._run}-shared"))
        wanted = [(f"$share/{self._run}/{self._topic}/{number}/+", 1) for number in range(count)]
        writer.write(subscribe_packet(1, wanted))
        await _packets(reader, 0x90, 1)
        await asyncio.sleep(self._quiet)
        writer.transport.abort()

    async def in_flight_1(self, count: int) -> None:
        """Packet identifiers of a QoS 1 subscriber that acknowledges nothing, and disconnects."""
        await self._in_flight(count, 1)

    async def in_flight_2(self, count: int) -> None:
        """The same at QoS 2."""
        await self._in_flight(count, 2)

    async def _in_flight(self, count: int, qos: int) -> None:
        place = f"{self._topic}/flight-{qos}"
        connect = connect_packet(f"{self._run}-flight-{qos}", receive_maximum=65535, session_expiry_s=2)
        reader, writer = await self._mqtt(connect)
        writer.write(subscribe_packet(1, [(place, qos)]))
        await _packets(reader, 0x90, 1)
        published = 0
        reply, other = await self._mqtt(connect_packet(f"{self._run}-publisher-{qos}"))
        async with beside(_packets(reader, 0x30 | qos << 1, count)) as (arriving,):
            while published < count:
                step = min(200, count - published)
                numbers = range(1, step + 1)
                other.write(b"".join([publish_packet(place, b"x", qos, number) for number in numbers]))
                await _packets(reply, 0x40 if qos == 1 else 0x50, step)
                if qos == 2:
                    other.write(b"".join([packet(0x62, struct.pack(">H", number)) for number in numbers]))
                    await _packets(reply, 0x70, step)
                published += step
            await arriving
        other.close()
        writer.transport.abort()

    async def _mqtt(self, connect: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._gateway.address("mqtt"), limit=1 << 22)
        writer.write(connect)
        await _packets(reader, 0x20, 1)
        return reader, writer

    # HTTP

    async def streams(self, count: int) -> None:
        """Server-sent event streams of one topic, whose sockets break together."""
        path = f"/topics/{self._topic}/stream?format=text"
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
        address = self._gateway.address("http")

        async def begin() -> asyncio.StreamWriter:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request.encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            assert b" 200 " in head, head
            return writer

        await self._crowd(count, begin, lambda writer: writer.transport.abort())

    async def sockets(self, count: int) -> None:
        """WebSockets with one subscription each to one topic, broken together."""
        host, port = self._gateway.address("http")
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def begin() -> Any:
                socket = await http.ws_connect(f"http://{host}:{port}/stream", protocols=["trivium.v1"])
                await socket.send_json({"type": "subscribe", "id": "1", "topic": self._topic, "credit": 1})
                await socket.receive(timeout=WAIT_S)
                return socket

            await self._crowd(count, begin, lambda _: None)

    async def consumers(self, count: int) -> None:
        """Consumer instances of one group that read nothing, deleted one by one."""
        async with self._http() as (http, base):
            for number in range(count):
                body = f'{{"name": "c{number}", "format": "binary"}}'
                async with http.post(f"{base}/consumers/{self._run}", data=body, headers=KAFKA_JSON) as answer:
                    assert answer.status == 200, await answer.text()
            for number in range(count):
                path = f"{base}/consumers/{self._run}/instances/c{number}"
                async with http.delete(path, headers=KAFKA_JSON) as answer:
                    assert answer.status == 204, await answer.text()

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
        host, port = self._gateway.address("http")
        async with aiohttp.ClientSession() as http:
            yield http, f"http://{host}:{port}"

    async def connections(self, count: int) -> list[asyncio.StreamWriter]:
        """MQTT connections that stay open until the gateway stops."""
        made: list[asyncio.StreamWriter] = []
        for first in range(0, count, 50):
            numbers = range(first, min(count, first + 50))
            opened = await asyncio.gather(
                *(self._mqtt(connect_packet(f"{self._run}-stay-{number}", session_expiry_s=60)) for number in numbers)
            )
            made += [writer for _, writer in opened]
        return made

    async def _crowd(self, count: int, begin: Callable[[], Any], end: Callable[[Any], object]) -> None:
        made: list[Any] = []
        for first in range(0, count, 50):
            made += await asyncio.gather(*(begin() for _ in range(min(50, count - first))))
        await asyncio.sleep(self._quiet)
        for one in made:
            end(one)


async def _packets(reader: asyncio.StreamReader, first: int, count: int) -> None:
    """Wait for `count` MQTT packets of a kind."""
    packets, got = Packets(), 0
    async with asyncio.timeout(WAIT_S):
        while got < count:
            data = await reader.read(1 << 18)
            if not data:
                raise ConnectionResetError("the gateway closed the connection")
            got += sum(kind == first for kind, _ in packets.feed(data))
