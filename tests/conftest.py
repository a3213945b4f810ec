"""Fixtures that every test shares: one broker for the whole run, topics of each test's own."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

NewTopicFactory = Callable[..., Awaitable[str]]


@pytest.fixture(scope="session")
def bootstrap() -> str:
    """The broker's address: TRIVIUM_TEST_BOOTSTRAP, or an embedded broker for the run."""
    return os.environ["TRIVIUM_TEST_BOOTSTRAP"]


@pytest.fixture(scope="session")
async def admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
def new_topic(admin: AIOKafkaAdminClient) -> NewTopicFactory:
    async def create(partitions: int = 3, **configs: str) -> str:
        name = f"t-{uuid.uuid4().hex[:12]}"
        topic_configs = {key.replace("_", "."): value for key, value in configs.items()}
        await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=topic_configs)])
        return name

    return create
