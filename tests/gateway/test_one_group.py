"""One Kafka consumer group with members of four kinds: MQTT, AMQP, HTTP and a native Kafka client."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from proton.utils import BlockingConnection

from protocols.mqtt.packets import Puback, Publish, Subscription
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

NewTopic = Callable[..., Awaitable[str]]
Connect = Callable[[], Awaitable[RawClient]]
V2 = "application/vnd.kafka.v2+json"


class AmqpReceiver:
    """A receiver with unlimited credit that accepts everything, in a thread."""

    def __init__(self, gateway: GatewayProcess, address: str) -> None:
        host, port = gateway.address("amqp")
        self.connection = BlockingConnection(f"amqp://{host}:{port}", timeout=60)
        self.link = self.connection.create_receiver(address, credit=1000)

    def receive(self, count: int) -> list[bytes]:
        bodies = []
        for _ in range(count):
            message = self.link.receive(20)  # proton's body is a view into it
            bodies.append(bytes(message.body))
            self.link.accept()
        return bodies


class HttpConsumer:
    """A consumer instance."""

    def __init__(self, session: aiohttp.ClientSession, url: str, group: str) -> None:
        self._session = session
        self._url = f"{url}/consumers/{group}"

    async def _post(self, url: str, body: Any) -> Any:
        async with self._session.post(url, json=body, headers={"Content-Type": V2}) as answer:
            assert answer.status in (200, 204)
            return await answer.json() if answer.status == 200 else None

    async def join(self, topic: str) -> HttpConsumer:
        created = await self._post(self._url, {"format": "binary", "auto.offset.reset": "latest"})
        self._url += f"/instances/{created['instance_id']}"
        await self._post(f"{self._url}/subscription", {"topics": [topic]})
        return self

    async def poll(self) -> list[Any]:
        headers = {"Accept": "application/vnd.kafka.binary.v2+json"}
        async with self._session.get(f"{self._url}/records?timeout=200", headers=headers) as answer:
            assert answer.status == 200
            return await answer.json()

    async def assigned(self) -> int:
        """Return the number of partitions that it is assigned."""
        async with self._session.get(f"{self._url}/subscription") as answer:
            shares = (await answer.json(content_type=None))["partitions"]
        return sum(len(numbers) for share in shares for numbers in share.values())

    async def leave(self) -> None:
        async with self._session.delete(self._url, headers={"Content-Type": V2}) as answer:
            assert answer.status == 204


@pytest.fixture
async def connect(gateway: GatewayProcess) -> AsyncIterator[Connect]:
    made: list[RawClient] = []

    async def connect() -> RawClient:
        made.append(await RawClient.connect(gateway.address("mqtt")))
        return made[-1]

    yield connect
    for client in made:
        client.drop()


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


async def test_an_amqp_receiver_takes_over_from_an_mqtt_client(
    gateway: GatewayProcess, connect: Connect, new_topic: NewTopic, group: str
) -> None:
    topic = await new_topic(partitions=1)
    leaver = await connect()
    await leaver.subscribe(Subscription(f"$share/{group}/{topic}/#", 1))
    amqp = await asyncio.to_thread(AmqpReceiver, gateway, f"{topic}/group.id/{group}")
    async with asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(asyncio.to_thread(amqp.receive, 19))
        sender = await connect()
        for number in range(20):
            await sender.publish(f"{topic}/a", b"%d" % number)
        mine = [await leaver.expect(Publish) for _ in range(10)]  # they take turns
        leaver.send(Puback(mine[0].packet_id))
        await leaver.ping()
        leaver.drop()
    assert sorted([mine[0].payload, *receiving.result()], key=int) == [b"%d" % number for number in range(20)]
    await asyncio.to_thread(amqp.connection.close)


async def test_members_of_four_kinds_share_a_group(
    gateway: GatewayProcess,
    connect: Connect,
    bootstrap: str,
    new_topic: NewTopic,
    group: str,
) -> None:
    topic = await new_topic(partitions=3)
    native = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        heartbeat_interval_ms=100,
        partition_assignment_strategy=(RangePartitionAssignor,),
    )
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    async with native, producer, aiohttp.ClientSession() as session:
        http = await HttpConsumer(session, f"http://{gateway.addresses['http']}", group).join(topic)
        mqtt = await connect()
        await mqtt.subscribe(Subscription(f"$share/{group}/{topic}/#", 1))
        amqp = await asyncio.to_thread(AmqpReceiver, gateway, f"{topic}/group.id/{group}")
        await wait_until(lambda: len(native.assignment()) == 1)
        async with asyncio.timeout(60):
            while await http.assigned() != 1:
                await http.poll()
        assert await http.poll() == []
        for number in range(90):
            await producer.send(topic, b"%d" % number, b"k", partition=number % 3)
        await producer.flush()
        receiving = asyncio.create_task(asyncio.to_thread(amqp.receive, 15))
        by_mqtt = [message.payload for message in await mqtt.messages(15)]
        by_amqp = await receiving
        by_http: list[bytes] = []
        by_native: list[bytes] = []
        async with asyncio.timeout(60):
            while len(by_http) < 30:
                by_http += [base64.b64decode(record["value"]) for record in await http.poll()]
            while len(by_native) < 30:
                by_native.append((await native.getone()).value)
        everything = sorted((*by_mqtt, *by_amqp, *by_http, *by_native), key=int)
        assert everything == [b"%d" % number for number in range(90)]
        await http.leave()
    await asyncio.to_thread(amqp.connection.close)
