"""Makes as many of a thing as a client can have, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp

from loadtest.beside import in_turn
from loadtest.clients.amqp_wire import (
    ATTACH,
    DETACH,
    DISPOSITION,
    FALSE,
    FLOW,
    NULL,
    TRUE,
    ZERO,
    frame,
    listed,
    performative,
    string,
    symbols,
    transfer,
    uint,
)
from loadtest.clients.mqtt_wire import connect_packet, packet, publish_packet, subscribe_packet, text
from loadtest.clients.talk import PUBACK, PUBCOMP, PUBREC, SUBACK, AmqpTalk, MqttTalk
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering

_COORDINATOR: Final = b"\x00\x53\x30" + listed([symbols(["amqp:local-transactions"])])
_DECLARE: Final = b"\x00\x53\x77\x00\x53\x31\x45"  # an amqp-value
_ME: Final = b"\x00\x53\x28" + listed([string("me")])


class Numbers(NamedTuple):
    """The number of each; `quiet` is the pause in seconds around each."""

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


def receiver(handle: int, address: str, *capabilities: str) -> bytes:
    """Return the attach of a receiver link."""
    source = listed([string(address), *[NULL] * 9, symbols(capabilities) if capabilities else NULL])
    target = b"\x00\x53\x29" + listed([string("me")])
    terms = (string(f"held-{handle}"), uint(handle), TRUE, NULL, NULL, b"\x00\x53\x28" + source, target)
    return frame(performative(ATTACH, *terms))


def sender(handle: int, target: bytes) -> bytes:
    """Return the attach of a sender link to an encoded target."""
    terms = (string(f"held-{handle}"), uint(handle), FALSE, NULL, NULL, _ME, target, NULL, NULL, ZERO)
    return frame(performative(ATTACH, *terms))


def drain(handle: int, delivery_count: int) -> bytes:
    """Return a flow of a receiver link with 10 credits and drain (part 2.6.7)."""
    counts = [uint(number) for number in (0, 2048, 0, 2048, handle, delivery_count, 10)]
    return frame(performative(FLOW, *counts, NULL, TRUE))


Attaches = Callable[[int], list[bytes]]
"""Returns that many attaches."""


class Many:
    """The drivers; each makes `count` of something and ends it."""

    def __init__(self, gateway: GatewayProcess, plan: Numbers) -> None:
        self._gateway = gateway
        self._quiet = plan.quiet
        self._run = Numbering().run
        self.topic = f"many-{self._run}"
        groups = f"/group.id/{self._run}-g{{}}"
        self.parts: dict[str, tuple[int, Callable[[int], Awaitable[None]]]] = {
            "AMQP: senders of a connection that breaks": (
                plan.links,
                partial(self._broken, self._to_topic),
            ),
            "AMQP: receivers of a connection that breaks": (
                plan.receivers,
                partial(self._broken, self._from()),
            ),
            "AMQP: links of a session that ends": (plan.links, self._session),
            "AMQP: links detached in one breath": (plan.links, self._detached),
            "AMQP: receivers of a topic, detached one by one": (
                plan.held,
                partial(self._one_by_one, self._from()),
            ),
            "AMQP: receivers of a topic that drain at once": (plan.held, self._drained),
            "AMQP: members of one group, detached one by one": (
                plan.held,
                partial(self._one_by_one, self._from("", "queue")),
            ),
            "AMQP: receivers of as many groups": (
                plan.groups,
                partial(self._one_by_one, self._from(groups)),
            ),
            "AMQP: open transactions of a connection that breaks": (plan.transactions, self._transactions),
            "MQTT: filters of one SUBSCRIBE, then the end": (plan.filters, self._filters),
            "MQTT: user properties of one PUBLISH": (plan.filters, self._properties),
            "MQTT: subscriptions, a packet for each": (plan.held, self._subscribes),
            "MQTT: shared subscriptions of one group": (plan.held, self._shared),
            "MQTT: packet ids in flight, QoS 1": (plan.flight, partial(self._in_flight, 1)),
            "MQTT: packet ids in flight, QoS 2": (plan.flight, partial(self._in_flight, 2)),
            "MQTT: retained messages for one filter": (plan.retained, self._retained),
            "MQTT: connections with wills that break at once": (plan.connections, self._wills),
            "MQTT: kept sessions that end at once": (plan.sessions, self._sessions),
            "HTTP: records of one request": (plan.records, self._records),
            "HTTP: subscriptions of a WebSocket that ends": (plan.subscriptions, self._subscriptions),
            "HTTP: event streams of a topic that break at once": (plan.streams, self._streams),
            "HTTP: WebSockets of a topic that break at once": (plan.streams, self._sockets),
            "HTTP: consumer instances": (plan.consumers, self._consumers),
        }
        """By name: how many, and the driver."""

    # AMQP

    @contextlib.asynccontextmanager
    async def _attached(self, attaches: Sequence[bytes]) -> AsyncIterator[AmqpTalk]:
        """Open a connection with links; it breaks after the block."""
        talk = await AmqpTalk.open(self._gateway.address("amqp"), f"{self._run}-links")
        await talk.ask(attaches, ATTACH)
        yield talk
        talk.drop()

    def _to_topic(self, count: int) -> list[bytes]:
        target = b"\x00\x53\x29" + listed([string(self.topic)])
        return [sender(number, target) for number in range(count)]

    def _from(self, suffix: str = "", *capabilities: str) -> Attaches:
        address = self.topic + suffix
        return lambda count: [receiver(number, address.format(number), *capabilities) for number in range(count)]

    async def _broken(self, attaches: Attaches, count: int) -> None:
        async with self._attached(attaches(count)):
            pass

    async def _session(self, count: int) -> None:
        async with self._attached(self._to_topic(count)) as talk:
            talk.writer.write(frame(performative(0x17)))
            await asyncio.sleep(self._quiet)

    async def _detached(self, count: int) -> None:
        async with self._attached(self._to_topic(count)) as talk:
            talk.writer.write(b"".join(frame(performative(DETACH, uint(number), TRUE)) for number in range(count)))
            await talk.writer.drain()
            await asyncio.sleep(self._quiet)

    async def _one_by_one(self, attaches: Attaches, count: int) -> None:
        """Attach receivers and detach them while they are behind."""
        async with self._attached(attaches(count)) as talk:
            await asyncio.sleep(self._quiet)
            await talk.ask([frame(performative(DETACH, uint(one), TRUE)) for one in range(count)], DETACH)

    async def _drained(self, count: int) -> None:
        """Drain all receivers of a silent topic together, twice."""
        await create_topic(self._gateway.kafka, f"{self.topic}-silent")
        async with self._attached(self._from("-silent")(count)) as talk:
            for delivery_count in (0, 10):
                await talk.ask([drain(number, delivery_count) for number in range(count)], FLOW)

    async def _transactions(self, count: int) -> None:
        async with self._attached([sender(0, _COORDINATOR)]) as talk:
            for first in range(0, count, 10):  # within the link's credit
                numbers = range(first, min(count, first + 10))
                await talk.ask([transfer(number, b"%d" % number, _DECLARE) for number in numbers], DISPOSITION)
            await asyncio.sleep(self._quiet)

    # MQTT

    async def _mqtt(self, name: str, **options: Any) -> MqttTalk:
        return await MqttTalk.open(
            self._gateway.address("mqtt"), connect_packet(f"{self._run}-{name}", **options), limit=1 << 22
        )

    async def _filters(self, count: int) -> None:
        talk = await self._mqtt("filters")
        await talk.ask([subscribe_packet(1, [(f"{self.topic}/{number}/+", 1) for number in range(count)])], SUBACK)
        talk.drop()

    async def _properties(self, count: int) -> None:
        talk = await self._mqtt("properties")
        properties = b"".join(b"\x26" + text(f"name-{number}") + text("value") for number in range(count))
        await talk.ask([publish_packet(f"{self.topic}/properties", b"x", 1, 1, properties=properties)], PUBACK)
        talk.drop()

    async def _subscribes(self, count: int) -> None:
        talk = await self._mqtt("subscribes")
        wanted = [[(f"{self.topic}/{number}/+", 1)] for number in range(count)]
        await talk.ask([subscribe_packet(number % 65535 + 1, one) for number, one in enumerate(wanted)], SUBACK)
        talk.drop()

    async def _shared(self, count: int) -> None:
        talk = await self._mqtt("shared")
        wanted = [(f"$share/{self._run}/{self.topic}/{number}/+", 1) for number in range(count)]
        await talk.ask([subscribe_packet(1, wanted)], SUBACK)
        await asyncio.sleep(self._quiet)
        talk.drop()

    async def _in_flight(self, qos: int, count: int) -> None:
        """Deliver to a subscriber that acknowledges nothing."""
        place = f"{self.topic}/flight-{qos}"
        talk = await self._mqtt(f"flight-{qos}", receive_maximum=65535, session_expiry_s=2)
        await talk.ask([subscribe_packet(1, [(place, qos)])], SUBACK)
        other = await self._mqtt(f"publisher-{qos}")
        for first in range(0, count, 200):
            numbers = range(1, min(200, count - first) + 1)
            await other.ask([publish_packet(place, b"x", qos, one) for one in numbers], PUBACK if qos == 1 else PUBREC)
            if qos == 2:
                await other.ask([packet(0x62, struct.pack(">H", one)) for one in numbers], PUBCOMP)
        await talk.take(0x30 | qos << 1, count)
        other.drop()
        talk.drop()

    async def _retained(self, count: int) -> None:
        talk, place = await self._mqtt("retained"), f"{self.topic}/kept"
        for first in range(0, count, 50):
            numbers = range(first, min(count, first + 50))
            kept = [text(f"{place}/{one}") + struct.pack(">H", one - first + 1) + b"\0x" for one in numbers]
            await talk.ask([packet(0x33, one) for one in kept], PUBACK)
        talk.writer.write(subscribe_packet(1000, [(f"{place}/#", 0)]))
        await talk.take(0x31, count)  # with RETAIN
        talk.drop()

    async def _wills(self, count: int) -> None:
        will = (f"{self.topic}/will", b"gone")
        await self._crowd(count, lambda number: self._mqtt(f"will-{number}", will=will), MqttTalk.drop)

    async def _sessions(self, count: int) -> None:
        """Make sessions that expire after a second, all left at the same moment."""
        await self._crowd(count, lambda number: self._mqtt(f"kept-{number}", session_expiry_s=1), MqttTalk.drop)
        await asyncio.sleep(3.0)

    async def _crowd(self, count: int, begin: Callable[[int], Awaitable[Any]], end: Callable[[Any], object]) -> None:
        """Begin many, several at a time, and end them together."""
        made: list[Any] = []

        async def one(number: int) -> None:
            made.append(await begin(number))

        await in_turn(range(count), one)
        await asyncio.sleep(self._quiet)
        for each in made:
            end(each)

    # HTTP

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[aiohttp.ClientSession]:
        base, connector = f"http://{self._gateway.addresses['http']}", aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base, connector=connector) as http:
            yield http

    async def _ask(self, http: aiohttp.ClientSession, method: str, path: str, media: str, value: Any = None) -> None:
        headers, body = {"Content-Type": media}, None if value is None else json.dumps(value)
        async with http.request(method, path, data=body, headers=headers) as answer:
            if answer.status >= 300:
                raise RuntimeError(await answer.text())

    async def _records(self, count: int) -> None:
        records = [{"key": str(number), "value": {"n": number}} for number in range(count)]
        async with self._http() as http:
            path, media = f"/topics/{self.topic}", "application/vnd.kafka.json.v2+json"
            await self._ask(http, "POST", path, media, {"records": records})

    async def _socket(self, http: aiohttp.ClientSession, count: int = 1) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket with subscriptions."""
        socket = await http.ws_connect("/stream", protocols=["trivium.v1"])
        for number in range(count):
            await socket.send_json({"type": "subscribe", "id": str(number), "topic": self.topic, "credit": 1})
        answered: set[str] = set()
        while len(answered) < count:
            answer = await socket.receive_json(timeout=60)
            if answer["type"] != "record":
                answered.add(answer["id"])
        return socket

    async def _subscriptions(self, count: int) -> None:
        async with self._http() as http:
            await self._socket(http, count)

    async def _sockets(self, count: int) -> None:
        async with self._http() as http:
            await self._crowd(count, lambda _: self._socket(http), lambda _: None)

    async def _streams(self, count: int) -> None:
        request = f"GET /topics/{self.topic}/stream?format=text HTTP/1.1\r\nHost: localhost\r\n\r\n"

        async def begin(_: int) -> asyncio.StreamWriter:
            reader, writer = await asyncio.open_connection(*self._gateway.address("http"))
            writer.write(request.encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            if b" 200 " not in head:
                raise RuntimeError(head)
            return writer

        await self._crowd(count, begin, lambda writer: writer.transport.abort())

    async def _consumers(self, count: int) -> None:
        """Make consumers of one group that read nothing, and delete them one by one."""
        media, group = "application/vnd.kafka.v2+json", f"/consumers/{self._run}"
        async with self._http() as http:
            for number in range(count):
                await self._ask(http, "POST", group, media, {"name": f"c{number}", "format": "binary"})
            for number in range(count):
                await self._ask(http, "DELETE", f"{group}/instances/c{number}", media)
