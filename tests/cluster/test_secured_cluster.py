"""With three brokers that require authentication, a gateway logs in to all of them and reads from the nearest."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.kafka.driver.client_settings import consumer_settings
from gateway.kafka.driver.kafka_consumer import log_consumer, poll
from gateway.kafka.driver.lifecycle import open_consumer
from gateway.runtime.spawn import Tasks
from gateway.settings.config import KafkaConfig
from tests.packaging.test_scripts_secured import (
    test_the_backup_logs_in,
    test_the_written_configuration_passes_the_doctor,
)
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.secured import secured_of
from tests.support.topics import produce, until_led
from tools.acls import allow_gateway
from tools.cluster import Cluster, new_cluster
from tools.secured import USER

__all__ = ["test_the_backup_logs_in", "test_the_written_configuration_passes_the_doctor"]

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    cluster = new_cluster(tmp_path_factory.mktemp("secured"), secured=True)
    await cluster.start()
    await allow_gateway(cluster.bootstrap_servers, USER)
    yield cluster
    await cluster.stop()


@pytest.fixture
def secured_broker(secured: Cluster) -> Cluster:
    """The cluster for the scripts' tests, which run with one broker otherwise."""
    return secured


async def new_topic(cluster: Cluster, name: str) -> str:
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 6, 3)])
    await until_led(admin, name)
    await admin.close()
    return name


def config_of(cluster: Cluster, **more: str) -> KafkaConfig:
    secured = secured_of(cluster)
    return KafkaConfig(
        bootstrap_servers=cluster.servers("SASL"), security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-512",
        sasl_username=USER, sasl_password_file=secured.ca.parent / "password", ssl_cafile=secured.ca, **more,
    )  # fmt: skip


@pytest.mark.parametrize("sessions", [False, True])
async def test_records_are_fetched_from_the_replica_in_the_same_rack(secured: Cluster, sessions: bool) -> None:
    """Both of the gateway's fetchers read a partition from a follower that is nearer than its leader."""
    topic = await new_topic(secured, f"rack-{sessions}")
    tasks = Tasks(lambda _: None)
    settings = consumer_settings(config_of(secured, rack="rack-2"), "tail")
    consumer = log_consumer(settings, on_missing=(lambda: None) if sessions else None)
    places = [TopicPartition(topic, number) for number in range(6)]
    async with open_consumer(consumer, tasks.spawn):
        consumer.assign(places)
        for place in places:
            consumer.seek(place, 0)
        values: list[bytes | None] = []
        for number in range(6):
            await produce(secured.bootstrap_servers, topic, [b"%d" % number], partition=number)
        async with asyncio.timeout(60):
            while len(values) < 6:
                for found in (await poll(consumer, wait_ms=100)).values():
                    values += [record.value for record in found]
        leaders = {consumer._client.cluster.leader_for_partition(place) for place in places}
        read_from = {consumer._fetcher._select_read_replica(place) for place in places}
    assert sorted(values, key=str) == [b"%d" % number for number in range(6)]
    assert leaders == {1, 2, 3}
    assert read_from == {2}
    await tasks.close()


async def test_a_gateway_serves_with_a_login_by_certificate(
    secured: Cluster, new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    own = secured_of(secured)
    topic = await new_topic(secured, "certificate")
    config = f"""
[kafka]
security_protocol = "SSL"
ssl_cafile = "{own.ca}"
ssl_certfile = "{own.certificate}"
ssl_keyfile = "{own.key}"
require_safe_topics = true
compression = "zstd"
rack = "rack-3"
"""
    gateway = await new_gateway(secured.servers("TLS"), config=config).start(120)
    client = await RawClient.connect(gateway.address("mqtt"))
    await client.subscribe(f"{topic}/#")
    await client.publish(f"{topic}/a", b"x" * 1000)
    assert (await client.message()).payload == b"x" * 1000
    await client.disconnect()
    address = f"http://{gateway.addresses['management']}"
    async with aiohttp.ClientSession(address) as http, http.get("/topics") as answer:
        told = await answer.json()
    topics = {one["name"]: one for one in told["topics"]}
    assert (told["brokers"], told["required"]) == (3, True)
    assert topics[topic] == {
        "name": topic, "partitions": 6, "copies": 3, "min_insync_replicas": 2, "safe": True, "reason": None,
    }  # fmt: skip
    assert "__trivium_sessions" in topics
    assert await gateway.stop() == 0
    assert not re.search("warning|error", gateway.log.read_text())
