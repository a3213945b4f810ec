"""The memory and the CPU of clients that do nothing: idle connections of each kind, and offline sessions.

An offline session must only cost its record, however many messages it has missed: the log is its queue. Some sessions
come back at the end and must get every message in order. `idle` grows the number of silent MQTT clients tenfold at a
time; each has its own subscription and pings according to its Keep Alive.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import statistics
import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import aiohttp

from loadtest.beside import beside, in_turn, until
from loadtest.clients import amqp_wire
from loadtest.clients.amqp_wire import GREETING, SASL_OUTCOME, attach_receiver, attach_sender
from loadtest.clients.crowd.opening import Opening, Step, opened
from loadtest.clients.kept.mqtt import EXPIRY_S, KeptSubscriber
from loadtest.clients.mqtt import DISCONNECT, Publisher, publishes
from loadtest.clients.mqtt_wire import connect_packet, subscribe_packet
from loadtest.clients.pace import Pace
from loadtest.clients.talk import CONNACK, SUBACK
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.engine.steady import Steady, send_and_verify
from loadtest.gateway import GatewayProcess, loop_cpu, process_cpu, process_resident
from loadtest.numbering import Numbering
from loadtest.verify import Arrivals, Ledger

SETTINGS: Final = {"TRIVIUM_AMQP__IDLE_TIMEOUT_S": "1800"}
"""The gateway's settings: the connections are silent while they are measured."""
LIMIT_S: Final = 120.0


class Crowd(NamedTuple):
    """Parameters.

    Attributes:
        protocol: of the connections.
        connections: idle ones of each kind.
        warm_up: connections of each kind, and sessions, before the first measurement.
        sessions: offline ones, MQTT only.
        backlog: messages queued for each session.
        returning: sessions that reconnect to get them.
        payload: bytes.
        settle: seconds before each measurement.
    """

    protocol: Literal["mqtt", "amqp"] = "mqtt"
    connections: int = 2_000
    warm_up: int = 300
    sessions: int = 10_000
    backlog: int = 1_000
    returning: int = 300
    payload: int = 100
    settle: float = 2.0


class Kind(NamedTuple):
    """A kind of idle connection."""

    name: str
    link: Literal["sender", "receiver"] | None = None  # AMQP only
    websocket: bool = False


KINDS: Final = {
    "mqtt": (Kind("connection"), Kind("connection, WebSocket", websocket=True)),
    "amqp": (
        Kind("session alone"),
        Kind("session and sender", "sender"),
        Kind("session and receiver", "receiver"),
        Kind("session and sender, WebSocket", "sender", websocket=True),
    ),
}


def steps(protocol: str, kind: Kind, name: str, topic: str) -> list[Step]:
    """Return the handshake of an idle connection."""
    if protocol == "mqtt":
        return [Step(connect_packet(name, keep_alive_s=600), [CONNACK])]
    attach = {"sender": attach_sender("idle", name, topic), "receiver": attach_receiver("idle", name, topic)}
    asked = [amqp_wire.BEGIN, *([amqp_wire.ATTACH] if kind.link else [])]
    opening = Step(amqp_wire.opening(name) + (attach[kind.link] if kind.link else b""), asked)
    granted = [Step(amqp_wire.credit(0, 0, 100))] if kind.link == "receiver" else []
    return [Step(GREETING, [SASL_OUTCOME]), opening, *granted]


async def memory(stand: Stand, plan: Crowd) -> None:
    """Weigh idle connections, then sessions."""
    run = Numbering().run
    topic = f"memory-{run}"
    made: list[Opening] = []
    async with stand.gateway(SETTINGS) as gateway:
        await create_topic(gateway.kafka, topic)

        async def connect(kind: Kind, number: int) -> None:
            told = steps(plan.protocol, kind, f"{run}-{kind.name}-{number}", topic)
            address = gateway.address("http" if kind.websocket else plan.protocol)
            made.append(await opened(Opening(plan.protocol, told, websocket=kind.websocket), address))

        kinds = KINDS[plan.protocol]
        for kind in kinds:  # all stay open, so that none reuses the freed memory of another
            await in_turn(range(plan.warm_up), partial(connect, kind))
        for kind in kinds:
            numbers = range(plan.warm_up, plan.warm_up + plan.connections)
            await _weigh(
                stand, gateway, plan.settle, (kind.name, plan.connections), in_turn(numbers, partial(connect, kind))
            )
        for one in made:
            one.drop()
        if plan.protocol == "mqtt":
            await _sessions(stand, gateway, plan)


async def _weigh(
    stand: Stand, gateway: GatewayProcess, settle_s: float, what: tuple[str, int], work: Awaitable[Any], *,
    since: int | None = None,
) -> int:  # fmt: skip
    """Add a row with the bytes that each of so many costs, from now or from `since` on; return those from before."""
    name, count = what
    await asyncio.sleep(settle_s)
    before = process_resident(gateway.pid) if since is None else since
    began = time.monotonic()
    await work
    took = time.monotonic() - began
    await asyncio.sleep(settle_s)
    each = (process_resident(gateway.pid) - before) / max(1, count)
    stand.row(**{"": name, "count": count, "bytes each": round(each), "seconds": round(took, 1)})
    return before


async def _sessions(stand: Stand, gateway: GatewayProcess, plan: Crowd) -> None:
    """Weigh offline sessions, without and with a backlog, and let some return."""
    numbering, ledger, address = Numbering(), Ledger(), gateway.address("mqtt")
    topic = f"sessions-{numbering.run}"
    await create_topic(gateway.kafka, topic)
    books = [Arrivals(numbering) for _ in range(min(plan.returning, plan.sessions))]
    kept = [
        KeptSubscriber(
            address, f"{topic}-kept-{number}", f"{topic}/#", 1, lambda payload, _, book=book: book.take(payload)  # type: ignore[misc]
        )
        for number, book in enumerate(books)
    ]  # fmt: skip

    async def make(number: int) -> None:
        data = connect_packet(f"{topic}-{number}", session_expiry_s=EXPIRY_S) + subscribe_packet(1, [(f"{topic}/#", 1)])
        one = await opened(Opening("mqtt", [Step(data, [CONNACK, SUBACK]), Step(DISCONNECT)]), address)
        one.close()

    async def leave() -> None:
        await in_turn(range(len(kept), plan.sessions), make)
        await in_turn(kept, lambda one: _served(one, one.subscribed.is_set))

    async def publish() -> None:
        payloads = [numbering.payload(0, sequence, plan.payload) for sequence in range(plan.backlog)]
        packets = publishes(f"{topic}/news", payloads)
        publisher = Publisher(f"{topic}-publisher", packets, Pace(50, None), partial(ledger.acknowledge_run, 0))
        await publisher.join(address)
        publisher.start()
        await publisher.finished
        publisher.close()

    async def come_back() -> None:
        both = zip(kept, books, strict=True)
        await in_turn(both, lambda pair: _served(pair[0], lambda: pair[1].total >= plan.backlog))

    await in_turn(range(-plan.warm_up, 0), make)
    before = await _weigh(stand, gateway, plan.settle, ("offline session", plan.sessions), leave())
    await _weigh(stand, gateway, plan.settle, ("with its backlog", plan.sessions), publish(), since=before)
    await _weigh(stand, gateway, plan.settle, (f"after {len(kept)} returned", plan.sessions), come_back(), since=before)
    for one, book in zip(kept, books, strict=True):
        problems = [*one.faults, *book.verdict(ledger).problems(once=True)]
        stand.problems += [f"{one.client_id}: {problem}" for problem in problems]


async def _served(one: KeptSubscriber, is_done: Any) -> None:
    """Run a client until a condition is true, then let it leave; its session is kept."""
    async with asyncio.TaskGroup() as group:
        group.create_task(one.run())
        try:
            await until(is_done, f"{one.client_id} is served", LIMIT_S)
        finally:
            one.stop()


class Silence(NamedTuple):
    """Parameters of the largest size and of the measurements.

    Attributes:
        connections: the largest size; each size is ten times the one before, starting with `least`.
        least: the first size.
        at_once: connections opened at the same time.
        keep_alive: seconds; each client pings once in it.
        watch: seconds of silence in which CPU is measured.
        messages: of one publisher at QoS 1, 100 in flight.
        settle: pause in seconds before memory is measured.
    """

    connections: int = 50_000
    least: int = 1_000
    at_once: int = 200
    keep_alive: int = 60
    watch: float = 20.0
    messages: int = 20_000
    settle: float = 3.0

    def sizes(self) -> Iterable[int]:
        """Return the sizes in ascending order, as far as the open files of this process and the gateway allow."""
        most = min(self.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES)
        size = min(self.least, most)
        while size < most:
            yield size
            size *= 10
        yield most


ADDRESS_PORTS: Final = 1_000  # connections per local address: finding a port is slow when many are used
SPARE_FILES: Final = 500  # for the gateway's connections to Kafka, listeners and reserve
SCRAPES: Final = 5
TICK_S: Final = 0.02
GOLDEN: Final = 0.618034  # its multiples, modulo 1, are spread evenly however many there are
PINGREQ: Final = b"\xc0\x00"


class Idle:
    """Silent clients by number, and when each has to ping."""

    def __init__(self, gateway: GatewayProcess, topic: str, plan: Silence) -> None:
        self.clients: list[Opening] = []
        self._gateway, self._topic, self._plan = gateway, topic, plan
        self._pings: list[tuple[float, int]] = []  # a heap

    async def connect(self, number: int) -> None:
        """Connect one with its own subscription."""
        data = connect_packet(f"{self._topic}-{number}", keep_alive_s=self._plan.keep_alive)
        data += subscribe_packet(1, [(f"{self._topic}/{number}", 1)])
        place = (f"127.0.1.{number // ADDRESS_PORTS}", 0)
        one = Opening("mqtt", [Step(data, [CONNACK, SUBACK])])
        await opened(one, self._gateway.address("mqtt"), local_addr=place)
        first = time.perf_counter() + number * GOLDEN % 1 * self._plan.keep_alive  # at a steady rate at every size
        heapq.heappush(self._pings, (first, len(self.clients)))
        self.clients.append(one)

    async def ping(self) -> None:
        """Ping for each client once per Keep Alive, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            while self._pings and self._pings[0][0] <= now:
                due, number = self._pings[0]
                heapq.heapreplace(self._pings, (due + self._plan.keep_alive, number))
                self.clients[number].write(PINGREQ)


async def idle(stand: Stand, plan: Silence) -> None:
    """Measure memory, idle CPU, the metrics and one client's messages at every size."""
    async with stand.gateway() as gateway:
        pid, topic = gateway.pid, f"idle-{Numbering().run}"
        await create_topic(gateway.kafka, topic)
        crowd = Idle(gateway, topic, plan)
        await _publish(gateway, plan.messages)  # warm up
        await asyncio.sleep(plan.settle)
        empty = process_resident(pid)
        async with beside(crowd.ping()):
            for size in plan.sizes():
                before, began, used = len(crowd.clients), time.perf_counter(), process_cpu(pid)
                await in_turn(range(before, size), crowd.connect, plan.at_once)
                count, took, used = size - before, time.perf_counter() - began, process_cpu(pid) - used
                await asyncio.sleep(plan.settle)
                each, quiet, began = (process_resident(pid) - empty) / size, loop_cpu(pid), time.perf_counter()
                await asyncio.sleep(plan.watch)
                quiet = (loop_cpu(pid) - quiet) / (time.perf_counter() - began)
                gone = sum(not one.is_open for one in crowd.clients)
                stand.check(not gone, f"{gone} connections were lost")
                stand.row(**{
                    "connections": size, "connects per second": round(count / took),
                    "cpu us of each": round(used / count * 1e6), "idle cpu %": round(quiet * 100, 2),
                    "bytes each": round(each), **await _scrape(gateway),
                    **await _publish(gateway, plan.messages),
                    "gone": gone,
                })  # fmt: skip
        for one in crowd.clients:
            one.drop()


async def _scrape(gateway: GatewayProcess) -> dict[str, Any]:
    took, size = [], 0
    async with aiohttp.ClientSession() as http:
        for _ in range(SCRAPES):
            began = time.perf_counter()
            async with http.get(f"http://{gateway.addresses['management']}/metrics") as answer:
                size = len(await answer.read())
            took.append(time.perf_counter() - began)
    return {"/metrics ms": round(statistics.median(took) * 1000, 1), "its KiB": round(size / 1024)}


async def _publish(gateway: GatewayProcess, messages: int) -> dict[str, Any]:
    """Measure the cost of one publisher's messages."""
    measured, _ = await send_and_verify(Steady("mqtt", 1, 100, messages), gateway)
    return {
        "cpu us/msg": round(measured.cpu_us, 1),
        "messages per second": round(messages / measured.seconds),
        "PUBACK p99 ms": measured.latencies.milliseconds(99),
    }


SCENARIOS = (
    Scenario("memory", "measure the memory of idle connections and of offline sessions", Crowd(), memory),
    Scenario("idle", "measure the cost of silent MQTT clients as their number grows", Silence(), idle, pins=True),
)
