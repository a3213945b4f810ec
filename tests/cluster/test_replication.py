"""The topics that the gateway creates have the cluster's default replication factor."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tools.cluster import Cluster

pytestmark = pytest.mark.cluster


async def copies(admin: AIOKafkaAdminClient, prefix: str) -> dict[str, set[int]]:
    """Return the numbers of replicas of the partitions of each topic with this prefix."""
    names = [name for name in await admin.list_topics() if name.startswith(prefix)]
    described = await admin.describe_topics(names)
    return {topic["topic"]: {len(part["replicas"]) for part in topic["partitions"]} for topic in described}


@pytest.mark.parametrize(("config", "expected"), [("", 3), ("topic_replication = 2\n", 2)])
async def test_a_new_topic_has_the_default_or_the_configured_replication_factor(
    cluster: Cluster,
    cluster_admin: AIOKafkaAdminClient,
    new_gateway: Callable[..., GatewayProcess],
    config: str,
    expected: int,
) -> None:
    gateway = await new_gateway(cluster.bootstrap_servers, config=f"[kafka]\ncreate_topics = true\n{config}").start()
    topic = f"copies-{uuid.uuid4().hex[:8]}"
    client = await PahoClient(gateway.address("mqtt")).connect()
    assert await client.publish(f"{topic}/a") == 0
    await client.close()
    assert await copies(cluster_admin, topic) == {topic: {expected}}
    own = await copies(cluster_admin, "__trivium_")
    assert len(own) >= 4
    assert set.union(*own.values()) == {3}, "the first gateway made them"
