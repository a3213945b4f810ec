"""Lost sockets, and connections of clients that are closed or cancelled while they connect."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from gateway.kafka.driver.broker_connection import BrokerConnection
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
    await asyncio.sleep(0)  # the transport is closed, but the reader has not noticed yet
    with pytest.raises(KafkaConnectionError):
        await connection.send(MetadataRequest([]))
    assert not connection.connected()
    assert await client.force_metadata_update(), "another one takes its place"


@pytest.mark.parametrize("turns", [1, 2, 3, 6, 10])
async def test_a_connection_that_is_made_while_its_client_closes_is_closed(bootstrap: str, turns: int) -> None:
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await start_client(client.bootstrap, client.close, asyncio.create_task)
    (node,) = [broker.nodeId for broker in client.cluster.brokers()]
    connecting = asyncio.create_task(client.ready(node, group=ConnectionGroup.COORDINATION))
    for _ in range(turns):
        await asyncio.sleep(0)
    await client.close()
    await connecting
    assert not any(connection.connected() for connection in client._conns.values())


@pytest.mark.parametrize("turns", range(5))
async def test_a_client_whose_close_was_cancelled_can_be_closed_again(bootstrap: str, turns: int) -> None:
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await start_client(client.bootstrap, client.close, asyncio.create_task)
    assert await client.force_metadata_update()
    (connection,) = client._conns.values()
    closing = asyncio.create_task(client.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await client.close()
    assert not connection.connected()


def connected() -> list[BrokerConnection]:
    return [one for one in gc.get_objects() if isinstance(one, BrokerConnection) and one.connected()]


async def test_a_clients_first_connection_is_closed_when_its_bootstrap_is_cancelled(bootstrap: str) -> None:
    """As when the event loop ends while a producer replaces another: the bootstrap is not completed."""
    before = {id(one) for one in connected()}
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    beginning = asyncio.create_task(client.bootstrap())
    first: BrokerConnection | None = None
    while first is None or not (first._versions and first._requests):  # until it has requested the metadata
        await asyncio.sleep(0)
        first = next((one for one in connected() if id(one) not in before), None)
        assert not beginning.done()
    beginning.cancel()
    await asyncio.wait([beginning])
    assert not first.connected()
    await client.close()
