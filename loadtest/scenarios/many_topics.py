"""Scenario `many-topics`: the cost of `#` with many Kafka topics: first subscriber, later ones, idle time.

Also measures a SUBSCRIBE with many filters of missing topics, and the delay of a ping after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from loadtest.clients.mqtt_wire import Splitter, connect_packet, packet, subscribe_packet
from loadtest.gateway import process_cpu

MADE_AT_ONCE: Final = 250
PATIENCE_S: Final = 300.0
SUBACK, PINGRESP, CONNACK = 0x90, 0xD0, 0x20


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        topics: number of Kafka topics.
        partitions: of each topic.
        others: number of subscribers after the first.
        filters: number of filters in the SUBSCRIBE to missing topics.
        idle_s: how long the idle gateway is measured.
        settle_s: pause before the first; the gateway looks for new topics every five seconds while one is watched.
    """

    topics: int = 5000
    partitions: int = 1
    others: int = 5
    filters: int = 1000
    idle_s: float = 10.0
    settle_s: float = 6.0


class Measured(NamedTuple):
    """The gateway: MQTT address, process id, Kafka's address."""

    address: tuple[str, int]
    pid: int
    kafka: str


class _Client:
    """One connection that waits for one packet at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._splitter = Splitter()
        self._packets: list[tuple[int, bytes]] = []

    @classmethod
    async def connect(cls, gateway: Measured, client_id: str) -> _Client:
        client = cls(*await asyncio.open_connection(*gateway.address))
        await client.ask(connect_packet(client_id), CONNACK)
        return client

    async def ask(self, question: bytes, answer: int) -> float:
        """Send a packet, and return the seconds until its response."""
        begun = time.perf_counter()
        self.writer.write(question)
        await self.wait_for(answer)
        return time.perf_counter() - begun

    async def wait_for(self, answer: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for place, (first, _) in enumerate(self._packets):
                    if first == answer:
                        del self._packets[place]
                        return
                data = await self._reader.read(65536)
                if not data:
                    raise ConnectionError("the gateway closed the connection")
                self._packets += self._splitter.feed(data)


async def measure(gateway: Measured, plan: Plan) -> dict[str, Any]:
    """Create the topics, subscribe, and return wall and CPU seconds as columns of a report."""
    await _make_topics(gateway.kafka, plan)
    await asyncio.sleep(plan.settle_s)

    async def spent(question: bytes, number: int) -> tuple[float, float]:
        client = await _Client.connect(gateway, f"many-{number}")
        clients.append(client)
        before = process_cpu(gateway.pid)
        wall = await client.ask(question, SUBACK)
        return wall, process_cpu(gateway.pid) - before

    clients: list[_Client] = []
    everything = subscribe_packet(1, [("#", 1)])
    first = await spent(everything, 0)
    await asyncio.sleep(1)
    others = [await spent(everything, number) for number in range(1, plan.others + 1)]
    before = process_cpu(gateway.pid)
    await asyncio.sleep(plan.idle_s)
    idle = (process_cpu(gateway.pid) - before) / plan.idle_s
    absent = await _Client.connect(gateway, "many-absent")
    clients.append(absent)
    begun = time.perf_counter()
    absent.writer.write(subscribe_packet(1, [(f"absent-{number}/#", 1) for number in range(plan.filters)]))
    ping = await absent.ask(packet(PINGRESP - 0x10, b""), PINGRESP)
    await absent.wait_for(SUBACK)
    found = {
        "topics": plan.topics,
        "partitions": plan.partitions,
        "first_s": round(first[0], 3),
        "first_cpu_s": round(first[1], 2),
        "next_s": round(sorted(wall for wall, _ in others)[len(others) // 2], 3),
        "next_cpu_s": round(sum(cpu for _, cpu in others) / len(others), 3),
        "idle_cpu": round(idle, 3),
        "absent_filters": plan.filters,
        "absent_s": round(time.perf_counter() - begun, 3),
        "ping_s": round(ping, 3),
    }
    for client in clients:
        client.writer.close()
    return found


async def _make_topics(bootstrap: str, plan: Plan) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=120_000)
    await admin.start()
    try:
        there = set(await admin.list_topics())
        names = [name for number in range(plan.topics) if (name := f"many-{number:05}") not in there]
        for at in range(0, len(names), MADE_AT_ONCE):
            with contextlib.suppress(TimeoutError):
                await admin.create_topics(
                    [NewTopic(name, plan.partitions, 1) for name in names[at : at + MADE_AT_ONCE]]
                )
        async with asyncio.timeout(PATIENCE_S):
            while not there.issuperset(names):  # accepted, but the broker is still creating their logs
                await asyncio.sleep(0.5)
                there = set(await admin.list_topics())
    finally:
        await admin.close()
