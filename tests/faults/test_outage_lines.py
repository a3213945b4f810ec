"""While Kafka is away, the log tells it in a few lines, however many clients and parts of the gateway notice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from gateway.embedded.broker import EmbeddedBroker
from protocols.mqtt import packets
from tests.faults.test_frozen_answers import AmqpClient
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

CLIENTS = 4
ATTEMPTS = 30
"""Attempts to reach Kafka, and as many messages: each was a line before."""
MOST_LINES = 40
CONFIG = "drain_timeout_s = 2\n[kafka]\ncreate_topics = true\n[log]\nconnections = false\n"
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
BINARY = {"Accept": "application/vnd.kafka.binary.v2+json"}


async def test_an_outage_is_a_few_lines(stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers, config=CONFIG).start()
    name = f"away-{uuid.uuid4().hex[:6]}"
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession("http://{}:{}".format(*gateway.address("http"))))
        amqp = await stack.enter_async_context(AmqpClient(gateway.address("amqp")))
        clients, polls = [], []
        for number in range(CLIENTS):
            topic = f"{name}-{number}"
            client = await RawClient.connect(gateway.address("mqtt"), topic)
            await client.subscribe(f"{topic}/#", f"$share/{topic}/{topic}/#")
            await client.publish(f"{topic}/x", b"before")
            await amqp.receiver(topic)
            stack.callback(client.drop)
            clients.append(client)
            polls.append(await consumer(http, topic))
        before = len(lines(gateway))
        await stoppable.kill()
        async with refused(stoppable.bootstrap_servers) as attempts:
            for number in range(ATTEMPTS):
                for index, client in enumerate(clients):
                    client.send(packets.Publish(f"{name}-{index}/x", b"away", 1, packet_id=1000 + number))
                await asyncio.gather(*(poll(http, path) for path in polls))
                await wait_until(lambda number=number: len(attempts) > number)
        await stoppable.start()
        for client in clients:
            await client.answer(packets.Puback, 1000 + ATTEMPTS - 1)
        await wait_until(lambda: any("Kafka answers again" in line for line in lines(gateway)))
        told = lines(gateway)[before:]
    assert any("Kafka does not answer" in line for line in told)
    assert not any("unexpected failure" in line for line in told)
    assert not any("client connected" in line for line in lines(gateway))
    assert len(told) < MOST_LINES, "\n".join(told)


def lines(gateway: GatewayProcess) -> list[str]:
    return gateway.log.read_text().splitlines()


@asynccontextmanager
async def refused(servers: str) -> AsyncIterator[list[object]]:
    """Counts attempts to connect to a Kafka that is away; each is cut."""
    found: list[object] = []

    def cut(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.append(None)
        writer.transport.abort()

    host, _, port = servers.rpartition(":")
    async with await asyncio.start_server(cut, host, int(port)):
        yield found


async def consumer(http: aiohttp.ClientSession, topic: str) -> str:
    """Make a consumer of a topic that commits by itself; return the path of its records."""
    asked = {"name": "one", "format": "binary", "auto.offset.reset": "earliest"}
    async with http.post(f"/consumers/{topic}", json=asked, headers=CONTROL) as answer:
        assert answer.status == 200
    own = f"/consumers/{topic}/instances/one"
    async with http.post(f"{own}/subscription", json={"topics": [topic]}, headers=CONTROL) as answer:
        assert answer.status == 204
    while not await poll(http, f"{own}/records"):
        pass
    return f"{own}/records"


async def poll(http: aiohttp.ClientSession, path: str) -> bool:
    """Return whether there were records."""
    async with http.get(path, params={"timeout": "50"}, headers=BINARY) as answer:
        return len(await answer.read()) > 2
