"""A broker's socket is lost, and something is sent before whoever reads it has learned of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from gateway.kafka.driver.lifecycle import start_client


@pytest.fixture
async def client(bootstrap: str) -> AsyncIterator[AIOKafkaClient]:
    made = AIOKafkaClient(bootstrap_servers=bootstrap)
    await start_client(made.bootstrap, made.close, asyncio.create_task)
    yield made
    await made.close()


async def test_what_is_sent_into_a_lost_socket_is_a_broken_connection(client: AIOKafkaClient) -> None:
    assert await client.force_metadata_update()
    (connection,) = client._conns.values()
    connection._writer.transport.abort()
    await asyncio.sleep(0)  # its end was told, and is not read yet
    with pytest.raises(KafkaConnectionError):
        await connection.send(MetadataRequest([]))
    assert not connection.connected()
    assert await client.force_metadata_update(), "another one takes its place"
