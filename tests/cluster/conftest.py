"""Three brokers for the tests of this directory, which the default run excludes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.support import hung
from tools.cluster import Cluster, new_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers for the run; a test that stops one must start it again (`Cluster.start`)."""
    cluster = new_cluster(tmp_path_factory.mktemp("cluster"))
    with asyncio.Runner(loop_factory=hung.Loop) as runner:
        runner.run(cluster.start())
        yield cluster
        runner.run(cluster.stop())


@pytest.fixture
async def cluster_admin(cluster: Cluster) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)
    await client.start()
    yield client
    await client.close()
