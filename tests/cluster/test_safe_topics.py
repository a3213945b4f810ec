"""Topics whose acknowledged records may be on one broker only: logged, or refused with `require_safe_topics`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from proton import Message
from proton.utils import BlockingConnection

from gateway.kafka.cluster.doctor import examine
from gateway.settings.config import Config, KafkaConfig
from protocols.mqtt import packets
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import until_led
from tests.support.waiting import wait_until
from tools.cluster import Cluster

pytestmark = pytest.mark.cluster
NOT_ACCEPTED = 0x83
JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}


async def new_topic(admin: AIOKafkaAdminClient, copies: int, in_sync: int) -> str:
    name = f"safe-{uuid.uuid4().hex[:8]}"
    configs = {"min.insync.replicas": str(in_sync)}
    await admin.create_topics([NewTopic(name, 2, copies, topic_configs=configs)])
    await until_led(admin, name)
    return name


async def by_mqtt(gateway: GatewayProcess, topic: str) -> tuple[int, str]:
    """Publish at QoS 1; return PUBACK's reason code and reason string."""
    client = await RawClient.connect(gateway.address("mqtt"))
    client.send(packets.Publish(f"{topic}/a", b"1", 1, False, False, 1))
    answer = await client.answer(packets.Puback, 1)
    await client.disconnect()
    return answer.reason_code, "" if answer.properties is None else answer.properties.reason_string or ""


async def by_amqp(gateway: GatewayProcess, topic: str) -> str:
    """Send a message; return the outcome, or the condition of a rejection."""

    def run() -> str:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=60)
        delivery = connection.create_sender(topic).link.send(Message(body=b"1"))
        connection.wait(lambda: delivery.settled, timeout=60)
        condition = delivery.remote.condition
        outcome = str(delivery.remote_state.name) if condition is None else str(condition.name)
        connection.close()
        return outcome

    return await asyncio.to_thread(run)


async def by_http(gateway: GatewayProcess, topic: str) -> int:
    """Produce a record; return the status."""
    url = f"http://{gateway.addresses['http']}/topics/{topic}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"records": [{"value": 1}]}, headers=JSON) as response,
    ):
        return response.status


@pytest.mark.parametrize(("copies", "in_sync"), [(1, 1), (3, 1)])
async def test_each_protocol_refuses_unsafe_topics_until_they_are_safe(
    cluster: Cluster,
    cluster_admin: AIOKafkaAdminClient,
    new_gateway: Callable[..., GatewayProcess],
    copies: int,
    in_sync: int,
) -> None:
    config = "[kafka]\nrequire_safe_topics = true\nmetadata_max_age_s = 0.5\n"
    gateway = await new_gateway(cluster.bootstrap_servers, config=config).start()  # the gateway's topics are safe
    topic, safe = await new_topic(cluster_admin, copies, in_sync), await new_topic(cluster_admin, 3, 2)
    code, reason = await by_mqtt(gateway, topic)
    assert code == NOT_ACCEPTED
    assert topic in reason
    assert "require_safe_topics" in reason
    assert await by_amqp(gateway, topic) == "amqp:precondition-failed"
    assert await by_http(gateway, topic) == 503
    assert (await by_mqtt(gateway, safe))[0] < NOT_ACCEPTED
    assert gateway.log.read_text().count(topic) == 1, "told once"
    reader = await RawClient.connect(gateway.address("mqtt"))
    assert (await reader.subscribe(f"{topic}/#")).reason_codes[0] <= 2, "it may be read"
    await reader.disconnect()
    if copies == 3:
        await cluster_admin.alter_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic, {"min.insync.replicas": "2"})]
        )
        async with asyncio.timeout(60):
            while await by_http(gateway, topic) != 200:
                await asyncio.to_thread(lambda: None)
        assert (await by_mqtt(gateway, topic))[0] < 0x80
        assert await by_amqp(gateway, topic) == "ACCEPTED"
        await cluster_admin.alter_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic, {"min.insync.replicas": "1"})]
        )
        async with asyncio.timeout(60):  # and back again
            while await by_http(gateway, topic) == 200:
                await asyncio.to_thread(lambda: None)


async def test_without_the_setting_an_unsafe_topic_is_logged_once_and_counted(
    cluster: Cluster, cluster_admin: AIOKafkaAdminClient, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(cluster.bootstrap_servers).start()
    topic, safe = await new_topic(cluster_admin, 1, 1), await new_topic(cluster_admin, 3, 2)
    for name in (topic, safe, topic):
        assert (await by_mqtt(gateway, name))[0] < 0x80
        assert await by_http(gateway, name) == 200
    await wait_until(lambda: topic in gateway.log.read_text())
    log = gateway.log.read_text()
    assert log.count(topic) == 1
    assert safe not in log
    findings: list[str] = []
    config = Config(kafka=KafkaConfig(bootstrap_servers=cluster.bootstrap_servers))
    assert not await examine(config, lambda finding: findings.append(str(finding)))
    assert sum(topic in finding for finding in findings) == 1
    assert not any(safe in finding for finding in findings)
    assert sum("answers, and is new enough" in finding for finding in findings) == 3
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{gateway.addresses['management']}/metrics") as answer,
    ):
        assert "trivium_replication_unsafe_topics 1.0" in await answer.text()
