"""Scenario `fair`: greedy clients get equal shares, and modest ones what they ask for, under any load.

It has four parts. A sensor, an AMQP sender and an HTTP client, first alone, then with greedy MQTT clients with or
without a limit. A crowd of modest clients of all protocols, alone and with one greedy client of each protocol. Equal
connections that send without pause, of each protocol and of all: how equal their acknowledged shares are (Jain's
index), also with exhausted budgets. One busy AMQP link, alone and with many idle ones, also with exhausted budgets.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import aiohttp

from loadtest.beside import beside
from loadtest.clients import amqp, mqtt, rest
from loadtest.clients.greedy import Greedy
from loadtest.clients.modest import Modest
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies

MEBIBYTE: Final = 1 << 20
TIGHT: Final = {
    "TRIVIUM_BUDGET__PROCESS_BYTES": str(16 * MEBIBYTE),
    "TRIVIUM_BUDGET__TOPIC_BYTES": str(8 * MEBIBYTE),
}
"""Budgets that ten connections with large messages exhaust: a share is less than a window, and more than a read."""
LIMITED: Final = {"TRIVIUM_LIMITS__RULES": '[{"per": "connection", "in_bytes_per_s": 1000000}]'}
"""A limit that greedy clients reach, and modest ones do not."""
EQUAL: Final = 0.98
"""The least Jain's index of equal connections."""
SLOWER: Final = 3.0
"""How many times longer than alone a modest client may wait with greedy ones, at the 99th percentile."""
WARM_S: Final = 1.0
GREEDY_SIZE: Final = 4_096
GREEDY_BYTES: Final = 250_000_000  # the most bytes per second of one greedy client with the crowd
PROTOCOLS: Final = ("mqtt", "amqp", "http")
MOST_BYTES: Final = 60_000_000  # the most bytes per second of all: messages are prepared in advance
_TICK_S: Final = 0.01
_RATE: Final = 10.0  # messages per second of a modest client
_JSON: Final = {"Content-Type": "application/vnd.kafka.json.v2+json"}
_BODY: Final = b'{"records":[{"value":1}]}'


class Plan(NamedTuple):
    """Parameters; message bytes are `size` for greedy, `bytes` for equal clients, `large` for tight budgets."""

    greedy: int = 12
    size: int = 65_536
    connections: int = 10
    window: int = 200
    bytes: int = 2_048
    large: int = 4_096
    links: int = 500
    modest: int = 99
    seconds: float = 20.0


class Beside(NamedTuple):
    """The measurements of modest clients; `sensor`, `amqp` and `http` are latencies."""

    sensor: Latencies
    amqp: Latencies
    http: Latencies
    statuses: dict[int, int]
    most_bytes: int

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        took = {"sensor": self.sensor, "amqp": self.amqp, "http": self.http}
        columns = {f"{name} p{at}": found.milliseconds(at) for name, found in took.items() for at in (50, 99)}
        statuses = ", ".join(f"{status} x {count}" for status, count in sorted(self.statuses.items()))
        return {**columns, "http answers": statuses, "MiB in flight": round(self.most_bytes / MEBIBYTE)}


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) if any(shares) else 0.0


async def beside_greedy(gateway: GatewayProcess, plan: Plan) -> tuple[Beside, Beside]:
    """Measure modest clients of all protocols alone, and with greedy ones that send to another topic."""
    run = secrets.token_hex(3)
    quiet, flooded = f"fair-quiet-{run}", f"fair-flood-{run}"
    for topic in (quiet, flooded):
        await create_topic(gateway.kafka, topic)
    sensor = await Modest.start(*gateway.address("mqtt"), quiet, 1 / _RATE)
    try:
        await _modest(gateway, quiet, sensor, WARM_S)
        alone = await _modest(gateway, quiet, sensor, plan.seconds)
        flood = await Greedy.start(gateway.address("mqtt"), flooded, plan.greedy, plan.size)
        try:
            await asyncio.sleep(WARM_S)
            return alone, await _modest(gateway, quiet, sensor, plan.seconds)
        finally:
            await flood.stop()
    finally:
        await sensor.stop()


async def _modest(gateway: GatewayProcess, topic: str, sensor: Modest, seconds: float) -> Beside:
    """Measure the modest clients for some seconds, including late acknowledgements."""
    messages = max(1, int(seconds * _RATE))
    pace, name = Pace(messages, _RATE), f"fair-{secrets.token_hex(4)}"
    link = await _connect(gateway, "amqp", name, topic=topic, payloads=[b"x"] * messages, pace=pace)
    began = time.monotonic()
    async with _paced([link]), _most_in_flight(gateway) as most:
        http, statuses = await _post(gateway, topic, began + seconds)
        end = time.monotonic()
        await sensor.answered(end)
        await link.finished
    link.close()
    return Beside(sensor.between(began, end), link.latencies, http, statuses, most[0])


async def _post(gateway: GatewayProcess, topic: str, until: float) -> tuple[Latencies, dict[int, int]]:
    """Post one record per request, at the pace of a modest client."""
    took, statuses = Latencies(), collections.Counter[int]()
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:
        while (began := time.monotonic()) < until:
            async with http.post(f"/topics/{topic}", data=_BODY, headers=_JSON) as answer:
                await answer.read()
                statuses[answer.status] += 1
            took.record(time.monotonic() - began)
            await asyncio.sleep(max(0.0, began + 1 / _RATE - time.monotonic()))
    return took, dict(statuses)


async def equal(gateway: GatewayProcess, protocols: Sequence[str], plan: Plan) -> list[int]:
    """Return the acknowledged messages of connections that keep equal windows full to one partition."""
    topic = f"fair-{secrets.token_hex(4)}"
    await create_topic(gateway.kafka, topic, 1)
    total = int((plan.seconds + WARM_S) * MOST_BYTES / plan.bytes / plan.connections)
    senders = [
        await _connect(
            gateway, protocols[number % len(protocols)], f"fair-{number}",
            topic=topic, payloads=[b"x" * plan.bytes] * total, pace=Pace(plan.window, None),
        )
        for number in range(plan.connections)
    ]  # fmt: skip
    for sender in senders:
        sender.start()
    await asyncio.sleep(WARM_S)
    before = [sender.answered for sender in senders]
    await asyncio.sleep(plan.seconds)
    found = [sender.answered - count for sender, count in zip(senders, before, strict=True)]
    for sender in senders:
        sender.abandon()
    return found


async def _connect(
    gateway: GatewayProcess, protocol: str, name: str, *, topic: str, payloads: list[bytes], pace: Pace
) -> Sender:
    """Connect a sender of a protocol; an HTTP request has as many records as the window."""
    one: Sender
    if protocol == "mqtt":
        one = mqtt.Publisher(name, mqtt.publishes(f"{topic}/{name}", payloads), pace)
    elif protocol == "amqp":
        one = amqp.Sender(name, topic, amqp.transfers(payloads), pace)
    else:
        posts = rest.requests(gateway.addresses["http"], topic, payloads, batch=pace.window)
        one = rest.Producer(posts, len(payloads), pace, batch=pace.window)
    await one.join(gateway.address(protocol))
    return one


async def crowd(gateway: GatewayProcess, plan: Plan) -> list[tuple[str, dict[str, Latencies]]]:
    """Return the latencies of modest clients by protocol: alone, and with one greedy client of each protocol.

    Each modest client sends one message per second; the greedy ones keep their window full.
    """
    topic = f"fair-{secrets.token_hex(4)}"
    await create_topic(gateway.kafka, topic)
    await _crowd(gateway, topic, plan._replace(seconds=WARM_S))
    found = [("alone", await _crowd(gateway, topic, plan))]
    for protocol in PROTOCOLS:
        total = int((plan.seconds + 3 * WARM_S) * GREEDY_BYTES / GREEDY_SIZE)
        greedy = await _connect(
            gateway, protocol, f"greedy-{topic}",
            topic=topic, payloads=[b"x" * GREEDY_SIZE] * total, pace=Pace(plan.window, None),
        )  # fmt: skip
        greedy.start()
        await asyncio.sleep(WARM_S)
        before, began = greedy.answered, time.monotonic()
        found.append((f"one greedy client, {protocol}", await _crowd(gateway, topic, plan)))
        if greedy.finished.done() or greedy.answered == before:
            raise RuntimeError(f"the greedy client of {protocol} did not send all the time")
        rate = (greedy.answered - before) * GREEDY_SIZE / (time.monotonic() - began)
        found[-1] = (f"{found[-1][0]}, {rate / MEBIBYTE:.0f} MiB/s", found[-1][1])
        greedy.abandon()
    return found


async def _crowd(gateway: GatewayProcess, topic: str, plan: Plan) -> dict[str, Latencies]:
    messages = max(1, int(plan.seconds))
    senders: dict[str, list[Sender]] = {protocol: [] for protocol in PROTOCOLS}
    for number in range(plan.modest):
        protocol = PROTOCOLS[number % len(PROTOCOLS)]
        pace = Pace(1, 1.0, phase=1 - number / plan.modest)
        name = f"modest-{number}-{secrets.token_hex(3)}"
        senders[protocol].append(
            await _connect(gateway, protocol, name, topic=topic, payloads=[b"x"] * messages, pace=pace)
        )
    everybody = [one for found in senders.values() for one in found]
    async with _paced(everybody):
        await asyncio.gather(*(one.finished for one in everybody))
    took = {protocol: Latencies() for protocol in PROTOCOLS}
    for protocol, found in senders.items():
        for one in found:
            took[protocol].merge(one.latencies)
            one.close()
    return took


def check_crowd(found: list[tuple[str, dict[str, Latencies]]]) -> list[str]:
    """Return where modest clients waited too long."""
    (_, alone), *others = found
    return [
        f"{protocol}: p99 of {after:.0f} ms with {name}, {before:.0f} ms alone"
        for name, took in others
        for protocol in PROTOCOLS
        if (after := took[protocol].milliseconds(99)) > SLOWER * (before := alone[protocol].milliseconds(99))
    ]


async def idle(gateway: GatewayProcess, plan: Plan) -> tuple[float, float]:
    """Return messages per second of one AMQP link, alone and with idle ones."""
    rates = []
    for links in (0, plan.links):
        idle_topic = f"fair-idle-{secrets.token_hex(4)}"
        await create_topic(gateway.kafka, idle_topic, 1)
        connections = [
            await _connect(gateway, "amqp", f"idle-{n}", topic=idle_topic, payloads=[], pace=Pace(1, None))
            for n in range(links)
        ]
        (count,) = await equal(gateway, ["amqp"], plan._replace(connections=1))
        rates.append(count / plan.seconds)
        for connection in connections:
            connection.abandon()
    return rates[0], rates[1]


@contextlib.asynccontextmanager
async def _paced(senders: Sequence[Sender]) -> AsyncIterator[None]:
    """Push the senders at their rate during the block."""

    async def push() -> None:
        while True:
            for sender in senders:
                sender.push()
            await asyncio.sleep(_TICK_S)

    for sender in senders:
        sender.pace.start()
    async with beside(push()):
        yield


@contextlib.asynccontextmanager
async def _most_in_flight(gateway: GatewayProcess) -> AsyncIterator[list[int]]:
    """Measure the most bytes in flight to Kafka during the block, every half second."""
    most = [0]

    async def look() -> None:
        while True:
            most[0] = max(most[0], int((await gateway.metrics()).get("trivium_publisher_bytes_in_flight", 0)))
            await asyncio.sleep(0.5)

    async with beside(look()):
        yield most


KINDS: Final[Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]]] = {
    "mqtt": ({}, ("mqtt",)),
    "amqp": ({}, ("amqp",)),
    "http": ({}, ("http",)),
    "mixed": ({}, ("mqtt", "amqp", "http")),
    "tight, mqtt": (TIGHT, ("mqtt",)),
    "tight, amqp": (TIGHT, ("amqp",)),
    "tight, mixed": (TIGHT, ("mqtt", "amqp")),
}
"""Budgets, and the protocols of the equal connections. HTTP requests are admitted as a whole, so they cannot be equal
with a budget of only a few requests."""


def check(alone: Beside, flooded: Beside) -> list[str]:
    """Return how modest clients were affected."""
    problems = []
    for name in ("sensor", "amqp", "http"):
        before, after = (getattr(one, name).milliseconds(99) for one in (alone, flooded))
        if after > SLOWER * before:
            problems.append(f"{name}: p99 of {after:.0f} ms with greedy clients, {before:.0f} ms alone")
    refused = {status: count for status, count in flooded.statuses.items() if status != 200}
    if refused:
        problems.append(f"http: refused with greedy clients: {refused}")
    return problems
