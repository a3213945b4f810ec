"""Kafka treats `a.b` and `a_b` as one name: the configuration says which one may be created, in every protocol."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from proton import Message
from proton.utils import BlockingConnection, LinkDetached

from protocols.mqtt.packets import Puback, Publish
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import until_led

RUN = uuid.uuid4().hex[:8]
CONFIG = f"""
[kafka]
create_topics = true
topic_partitions = 1
[amqp]
dead_letter_topic = "{{topic}}.dead"
[mapping]
dotted_topics = ["chosen.{RUN}"]
"""


@pytest.fixture(scope="module")
async def choosing(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess(tmp_path_factory.mktemp("choosing"), bootstrap, config=CONFIG).start()
    yield process
    assert await process.stop() == 0


async def by_http(gateway: GatewayProcess, path: str, body: Any) -> tuple[int, str]:
    headers = {"Content-Type": "application/json" if "admin" in path else "application/vnd.kafka.json.v2+json"}
    async with (
        aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as session,
        session.post(path, json=body, headers=headers) as response,
    ):
        return response.status, await response.text()


async def produce(gateway: GatewayProcess, topic: str) -> int:
    return (await by_http(gateway, f"/topics/{topic}", {"records": [{"key": "k", "value": 1}]}))[0]


async def attach(gateway: GatewayProcess, topic: str) -> str:
    """Send a message; return the condition of the refusal, or "" if it was accepted."""

    def run() -> str:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=60)
        try:
            connection.create_sender(topic).send(Message(body=b"x"))
        except LinkDetached as detached:
            return str(detached.condition)
        finally:
            connection.close()
        return ""

    return await asyncio.to_thread(run)


async def publish(gateway: GatewayProcess, topic: str) -> Puback:
    client = await RawClient.connect(gateway.address("mqtt"))
    client.send(Publish(topic, b"x", 1, packet_id=1))
    answer = await client.expect(Puback)
    client.drop()
    assert isinstance(answer, Puback)
    return answer


async def test_a_colliding_name_is_not_created_by_its_first_user(choosing: GatewayProcess) -> None:
    """A dotted name that is not configured is not created, so the name that MQTT creates stays usable."""
    dotted, plain = f"first.{RUN}", f"first_{RUN}"
    assert await produce(choosing, dotted) == 404
    assert await attach(choosing, dotted) == "amqp:not-found"
    assert (await publish(choosing, f"{dotted}/x")).reason_code == 0  # to the catch-all topic
    assert (await publish(choosing, f"{plain}/x")).reason_code == 0
    assert await produce(choosing, plain) == 200
    assert await attach(choosing, plain) == ""


async def test_every_protocol_creates_the_configured_name(choosing: GatewayProcess) -> None:
    dotted, plain = f"chosen.{RUN}", f"chosen_{RUN}"
    assert await produce(choosing, plain) == 404
    assert await attach(choosing, plain) == "amqp:not-found"
    assert (await publish(choosing, f"{plain}/x")).reason_code == 0  # to the catch-all topic
    assert await produce(choosing, dotted) == 200
    assert await attach(choosing, dotted) == ""
    assert (await publish(choosing, f"{dotted}/x")).reason_code == 0
    assert await produce(choosing, f"{dotted}.dead") == 200, "dead letters wait for their topic"


@pytest.mark.parametrize("way", ["kafka", "http"])
async def test_an_administrators_topic_is_used_and_the_collision_is_logged(
    choosing: GatewayProcess, admin: AIOKafkaAdminClient, way: str
) -> None:
    dotted, plain = f"{way}.{RUN}", f"{way}_{RUN}"
    if way == "kafka":
        await admin.create_topics([NewTopic(dotted, 1, 1)])
    else:
        assert (await by_http(choosing, "/admin/topics", {"topic_name": dotted}))[0] == 201
    await until_led(admin, dotted)
    assert await produce(choosing, dotted) == 200
    assert await attach(choosing, dotted) == ""
    assert (await by_http(choosing, "/admin/topics", {"topic_name": dotted}))[0] == 409
    for _ in range(2):
        answer = await publish(choosing, f"{plain}/x")
        assert answer.reason_code == 0x90
        assert dotted in str(answer.properties)
    assert (await by_http(choosing, "/admin/topics", {"topic_name": plain}))[0] == 422
    lines = choosing.log.read_text().splitlines()
    told = [line for line in lines if "a topic is not created" in line and f'"topic": "{plain}"' in line]
    assert len(told) == 1
    assert dotted in told[0]
    assert "mapping.dotted_topics" in told[0]
