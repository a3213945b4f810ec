"""A broker's socket is lost, and something is sent before whoever reads it has learned of that; or the client is closed
while it connects.
"""

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
    await asyncio.sleep(0)  # its end was told, and is not read yet
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
async def test_who_gives_up_closing_a_client_leaves_it_to_the_next(bootstrap: str, turns: int) -> None:
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


async def test_a_first_connection_is_closed_when_its_client_is_given_up_meanwhile(bootstrap: str) -> None:
    """The loop ends while a producer takes another's place: nobody is left to go on to the bootstrap's end."""
    before = {id(one) for one in connected()}
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    beginning = asyncio.create_task(client.bootstrap())
    first: BrokerConnection | None = None
    while first is None or not (first._versions and first._requests):  # it has asked for the metadata
        await asyncio.sleep(0)
        first = next((one for one in connected() if id(one) not in before), None)
        assert not beginning.done()
    beginning.cancel()
    await asyncio.wait([beginning])
    assert not first.connected()
    await client.close()
