"""The gateway's internal topics (`__trivium_sessions`, `__trivium_retained`) are hidden from clients of every protocol.

Foreign clients against a running gateway, which reads and writes these topics itself at the same time.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import TopicAlreadyExistsError
from proton import Message
from proton.utils import BlockingConnection, LinkDetached

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.topics import until_led
from tests.support.waiting import wait_until

INTERNAL = ("__trivium_sessions", "__trivium_retained")
RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
WAIT_S = 60


@pytest.fixture
async def mark(bootstrap: str, admin: Any, gateway: GatewayProcess) -> AsyncIterator[bytes]:
    """Write a value to both topics that no client may see, and delete it afterwards."""
    mark = f"secret-{uuid.uuid4().hex}".encode()
    for name in INTERNAL:
        topic = NewTopic(name, 8, 1, topic_configs={"cleanup.policy": "compact"})
        (answer,) = (await admin.create_topics([topic])).topic_errors
        assert answer[1] in (0, TopicAlreadyExistsError.errno)
        await until_led(admin, name)
    # The key is neither a client id in use nor the name of an MQTT topic.
    key = b"#" + mark
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for name in INTERNAL:
            await producer.send_and_wait(name, mark, key=key)
        yield mark
        for name in INTERNAL:
            await producer.send_and_wait(name, None, key=key)


async def values(bootstrap: str, name: str) -> list[bytes | None]:
    """Read a whole topic with a plain Kafka client."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        numbers = await consumer._client._wait_on_metadata(name)
        partitions = [TopicPartition(name, number) for number in numbers]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        found: list[bytes | None] = []
        async with asyncio.timeout(WAIT_S):
            while any([await consumer.position(one) < end for one, end in ends.items()]):
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    found.extend(record.value for record in records)
    finally:
        await consumer.stop()
    return found


@pytest.mark.parametrize("name", INTERNAL)
async def test_mqtt_neither_reads_nor_writes_them(
    gateway: GatewayProcess, bootstrap: str, mark: bytes, name: str
) -> None:
    client = await PahoClient(gateway.address("mqtt")).connect()
    # Such a level is no Kafka topic's name, so the whole MQTT topic becomes a key in the catch-all topic.
    assert await client.subscribe(f"{name}/#") in (0, 1, 2)
    assert await client.subscribe("#") in (0, 1, 2)
    intruder = uuid.uuid4().hex.encode()
    assert await client.publish(f"{name}/{mark.decode()}", intruder) == 0
    await wait_until(lambda: any(message.payload == intruder for message in client.messages), WAIT_S)
    assert not any(mark == message.payload for message in client.messages)
    await client.close()
    stored = await values(bootstrap, name)
    assert mark in stored
    assert intruder not in stored


@pytest.mark.parametrize("name", INTERNAL)
async def test_amqp_attaches_no_link_to_them(gateway: GatewayProcess, bootstrap: str, mark: bytes, name: str) -> None:
    intruder = uuid.uuid4().hex.encode()

    def attempt(work: Callable[[BlockingConnection], Any]) -> str:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=WAIT_S)
        try:
            with pytest.raises(LinkDetached) as refused:
                work(connection)
        finally:
            connection.close()
        return str(refused.value.condition)

    addresses = (name, f"topic://{name}", f"/queues/{name}")
    targets = (*addresses, f"{name}/some/key", f"{name}/partitions/0")
    sources = (*addresses, f"{name}/group.id/g-{intruder.decode()}")
    for target in targets:
        condition = await asyncio.to_thread(attempt, lambda c, t=target: c.create_sender(t).send(Message(intruder)))
        assert condition == "amqp:unauthorized-access"
    for source in sources:
        condition = await asyncio.to_thread(attempt, lambda c, s=source: c.create_receiver(s).receive(WAIT_S))
        assert condition == "amqp:unauthorized-access"
    assert intruder not in await values(bootstrap, name)


@pytest.mark.parametrize("name", INTERNAL)
async def test_http_finds_none_of_them(gateway: GatewayProcess, bootstrap: str, mark: bytes, name: str) -> None:
    group = f"/consumers/g-{uuid.uuid4().hex}"
    intruder = uuid.uuid4().hex
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:

        async def ask(method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
            data = None if body is None else json.dumps(body).encode()
            async with http.request(method, path, data=data, headers=headers) as response:
                raw = await response.read()
                return response.status, json.loads(raw) if raw else None

        _, topics = await ask("GET", "/topics")
        assert not [topic for topic in topics if topic.startswith("__")]
        for path in ("", "/partitions", "/partitions/0", "/partitions/0/offsets"):
            assert (await ask("GET", f"/topics/{name}{path}"))[0] == 404
        # Other spellings of the same path do not reach them either.
        for spelled in (name, name.replace("_", "%5F")):
            for path in ("", "/partitions/0"):
                record = {"key": "k", "value": intruder} if not path else {"value": intruder}
                status, answer = await ask("POST", f"/topics/{spelled}{path}", {"records": [record]}, RECORDS)
                codes = {entry.get("error_code") for entry in answer.get("offsets", [])}
                assert status == 403 or codes == {403}, answer
        status, _ = await ask("POST", group, {"name": "c", "format": "binary"}, CONTROL)
        assert status == 200
        instance = f"{group}/instances/c"
        where = {"topic": name, "partition": 0}
        assert (await ask("POST", f"{instance}/subscription", {"topics": [name]}, CONTROL))[0] == 403
        assert (await ask("POST", f"{instance}/assignments", {"partitions": [where]}, CONTROL))[0] == 403
        assert (await ask("POST", f"{instance}/positions/beginning", {"partitions": [where]}, CONTROL))[0] == 404
        offsets = {"offsets": [{**where, "offset": 0}]}
        assert (await ask("POST", f"{instance}/positions", offsets, CONTROL))[0] == 404
        assert (await ask("POST", f"{instance}/offsets", offsets, CONTROL))[0] == 404
        # Neither does a pattern that matches them.
        assert (await ask("POST", f"{instance}/subscription", {"topic_pattern": "__.*"}, CONTROL))[0] == 204
        assert await ask("GET", f"{instance}/subscription") == (200, {"topics": [], "partitions": []})
        assert (await ask("DELETE", instance))[0] == 204
    assert not [value for value in await values(bootstrap, name) if value and intruder.encode() in value]
