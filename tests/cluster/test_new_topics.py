"""A new topic is found although not all brokers know it yet."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.publisher_kit import open_kit
from tests.support.topics import until_led
from tools.cluster import Cluster

pytestmark = pytest.mark.cluster
TOPICS = 40


async def test_every_new_topic_is_found(cluster: Cluster, cluster_admin: AIOKafkaAdminClient) -> None:
    async with open_kit(cluster.bootstrap_servers) as k:

        async def made_and_found(name: str) -> str:
            await cluster_admin.create_topics([NewTopic(name, 3, 3)])
            await until_led(cluster_admin, name)  # on the broker that answers
            return (await k.topics.get(name)).name

        names = [f"new-{uuid.uuid4().hex}" for _ in range(TOPICS)]
        assert await asyncio.gather(*map(made_and_found, names)) == names
