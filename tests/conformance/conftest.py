"""Fixtures for the clause tests of the running gateway: one Kafka topic, and clients that are closed at the end."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import until_led

Connect = Callable[..., Awaitable[RawClient]]
Settled = Callable[[], Awaitable[None]]


@pytest.fixture(scope="session")
async def ground(admin: AIOKafkaAdminClient) -> str:
    """Create a Kafka topic with one partition, which keeps the order of messages across MQTT topics."""
    name = f"clauses-{uuid.uuid4().hex[:8]}"
    await admin.create_topics([NewTopic(name, 1, 1)])
    await until_led(admin, name)
    return name


@pytest.fixture
def place(ground: str) -> str:
    """Return the first two levels of the topics of one test."""
    return f"{ground}/{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def connect(gateway: GatewayProcess) -> AsyncIterator[Connect]:
    """Connect `RawClient`s to the gateway, or another one: `connect(client_id, version=4, clean_start=False, ...)`."""
    clients: list[RawClient] = []

    async def one(client_id: str | None = None, /, to: GatewayProcess = gateway, **options: Any) -> RawClient:
        clients.append(await RawClient.connect(to.address("mqtt"), client_id, **options))
        return clients[-1]

    yield one
    for client in clients:
        client.drop()


@pytest.fixture
def settled(connect: Connect, place: str) -> Settled:
    """Wait until the gateway has read all published messages, so that a later subscription does not get them."""

    async def wait() -> None:
        client = await connect()
        await client.subscribe(f"{place}-settled")
        await client.publish(f"{place}-settled", b"", 0)
        await client.message()

    return wait


@pytest.fixture
def client_id() -> str:
    return f"me-{uuid.uuid4().hex[:12]}"


def kept(version: int, **more: Any) -> dict[str, Any]:
    """Return the options of a CONNECT that resumes its session, if any, and keeps it after the connection."""
    options: dict[str, Any] = {"version": version, "clean_start": False, **more}
    if version == 5:
        options.setdefault("session_expiry_interval", 60)
    return options
