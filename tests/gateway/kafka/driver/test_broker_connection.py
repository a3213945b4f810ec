"""Calls, lost sockets, and connections of clients that are closed or cancelled while they connect."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

import pytest
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.errors import CorrelationIdError, KafkaConnectionError, NodeNotReadyError, RequestTimedOutError
from aiokafka.protocol.metadata import MetadataRequest

from gateway.embedded.broker import EmbeddedBroker
from gateway.kafka.driver import wire
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


async def called(client: AIOKafkaClient) -> tuple[BrokerConnection, asyncio.Future[object]]:
    """Send an empty produce request; the future is its answer, or the error instead of one."""
    (node,) = [broker.nodeId for broker in client.cluster.brokers()]
    connection = await client._get_conn(node)
    answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    send(connection, answer)
    return connection, answer


def send(connection: BrokerConnection, answer: asyncio.Future[object], check: Callable[[], None] = int) -> None:
    connection.call(wire.PRODUCE, wire.produce_body([], 1000), answer.set_result, check)


async def test_a_call_is_answered(client: AIOKafkaClient) -> None:
    connection, answer = await called(client)
    assert not answer.done()
    assert await asyncio.wait_for(answer, 60) == wire.Produced([])
    assert connection.connected()


async def test_a_call_ends_with_its_connection(client: AIOKafkaClient) -> None:
    connection, answer = await called(client)
    connection.close()
    assert isinstance(answer.result(), KafkaConnectionError)
    with pytest.raises(KafkaConnectionError):
        send(connection, answer)


async def test_a_call_into_a_lost_socket_is_not_sent(client: AIOKafkaClient) -> None:
    connection, answer = await called(client)
    await asyncio.wait_for(answer, 60)
    connection._writer.transport.abort()
    await asyncio.sleep(0)  # the transport is closed, but the reader has not noticed yet
    with pytest.raises(KafkaConnectionError):
        send(connection, answer)
    assert not connection.connected()


async def test_what_must_not_leave_is_not_sent(client: AIOKafkaClient) -> None:
    connection, answer = await called(client)

    def check() -> None:
        raise NodeNotReadyError

    with pytest.raises(NodeNotReadyError):
        send(connection, asyncio.get_running_loop().create_future(), check)
    assert await asyncio.wait_for(answer, 60) == wire.Produced([])
    assert not connection._requests


async def test_an_answer_to_another_request_ends_the_connection(client: AIOKafkaClient) -> None:
    connection, answer = await called(client)
    connection._handle_frame((999).to_bytes(4, "big") + b"\0\0\0\0")
    assert isinstance(answer.result(), CorrelationIdError)
    assert not connection.connected()


async def test_a_call_without_an_answer_ends_in_time(
    stoppable: EmbeddedBroker, frozen: Callable[[], AbstractContextManager[None]]
) -> None:
    client = AIOKafkaClient(bootstrap_servers=stoppable.bootstrap_servers, request_timeout_ms=500)
    await start_client(client.bootstrap, client.close, asyncio.create_task)
    await asyncio.wait_for((await called(client))[1], 60)  # it is connected
    with frozen():
        connection, answer = await called(client)
        assert isinstance(await asyncio.wait_for(answer, 60), RequestTimedOutError)
        assert not connection.connected()
    await client.close()
