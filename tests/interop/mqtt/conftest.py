"""The foreign MQTT clients as fixtures: each driver starts once, with the first test that needs it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.interop.driver import Drivers, Wire, started
from tests.interop.mqtt.clients import DRIVERS, Kind
from tests.interop.mqtt.drivers import Client
from tests.support.gateway import GatewayProcess
from tests.support.topics import until_led

NewClient = Callable[..., Awaitable[Client]]


@pytest.fixture(scope="session")
async def mqtt_drivers() -> AsyncIterator[Drivers]:
    async with started(DRIVERS) as drivers:
        yield drivers


@pytest.fixture
async def new_client(mqtt_drivers: Drivers, gateway: GatewayProcess) -> AsyncIterator[NewClient]:
    """Make foreign clients (`await new_client(PAHO, **fields of connect)`), connected unless `connected=False`."""
    made: list[Client] = []

    async def make(
        kind: Kind,
        *,
        at: GatewayProcess | None = None,
        through: Wire | None = None,
        connected: bool = True,
        **fields: object,
    ) -> Client:
        listener = "http" if kind.transport == "ws" else "mqtt"
        address = through.address if through is not None else (at or gateway).address(listener)
        path = "/mqtt" if kind.transport == "ws" else None
        client = Client(await mqtt_drivers(kind.library), address, version=kind.version, path=path)
        made.append(client)
        if connected:
            connack = await client.connect(**fields)
            assert connack.reason == 0, connack
        return client

    yield make
    for client in made:
        await client.release()


@pytest.fixture
async def wire(gateway: GatewayProcess) -> AsyncIterator[Wire]:
    """A proxy to the gateway whose connections the test can cut."""
    async with Wire(gateway.address("mqtt")).listening() as proxy:
        yield proxy


@pytest.fixture(scope="session")
async def shared_topic(admin: AIOKafkaAdminClient) -> str:
    """One Kafka topic for all tests here; each uses its own branch of it."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    await admin.create_topics([NewTopic(name, 3, 1)])
    await until_led(admin, name)
    return name


@pytest.fixture
def branch(shared_topic: str) -> str:
    """Return a prefix for topic names that only this test uses."""
    return f"{shared_topic}/{uuid.uuid4().hex[:8]}"
